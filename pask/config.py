"""A run's YAML file, checked against configs/schema.json, as typed values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from pask.bfcl.prompts import style_named
from pask.digests import digest
from pask.errors import PaskError, known_names
from pask.paths import CONFIGS
from pask.structure.buckets import check_coarsening, check_first_layers


@dataclass(frozen=True)
class ModelConfig:
    name: str
    source: str
    path: str | None
    revision: str | None
    sha256: str | None
    prompt: str
    answer_form: str
    expected_new_tokens: Mapping[str, int]  # by subset


@dataclass(frozen=True)
class DataConfig:
    split: str
    seed: int
    part: str
    sample: Mapping[str, int] | None
    cal_sample: Mapping[str, int] | None
    dev_sample: Mapping[str, int] | None

    def sample_of(self, part: str) -> Mapping[str, int] | None:
        """Rows per category that come with a run beside those it evaluates; None: all of the part.

        For calibrating and searching they may be others than those of the same part that are
        evaluated.
        """
        own = {"cal": self.cal_sample, "dev": self.dev_sample}.get(part)
        return self.sample if own is None and part == self.part else own


@dataclass(frozen=True)
class EngineConfig:
    kv_dtype: str
    max_batch: int
    kv_capacity_tokens: int
    page_slots: int
    shards: int


@dataclass(frozen=True)
class BudgetConfig:
    """How knobs are set; see `pask.evaluation.budget`."""

    search: bool
    tolerance: float


@dataclass(frozen=True)
class StructureConfig:
    """How tokens are put into buckets; see `pask.structure.buckets`."""

    layer_groups: int | tuple[int, ...]  # how many, or the first layer of each
    coarsening: str

    def __post_init__(self) -> None:
        check_coarsening(self.coarsening)
        if not isinstance(self.layer_groups, int):
            check_first_layers(self.layer_groups)


@dataclass(frozen=True)
class Entry:
    """One line of the comparison: a method at one budget, e.g. `snapkv@0.33`."""

    name: str
    method: str
    budget: float
    params: Mapping[str, Any]
    variant: str = ""

    @property
    def family(self) -> str:
        """The entry's name without its budget: what all budgets of one setting share."""
        return f"{self.method}-{self.variant}" if self.variant else self.method


@dataclass(frozen=True)
class RunConfig:
    """A whole run; field by field what configs/schema.json describes."""

    run: str
    model: ModelConfig
    data: DataConfig
    max_new_tokens: int
    engine: EngineConfig
    structure: StructureConfig
    budget: BudgetConfig
    entries: tuple[Entry, ...]
    paper_model: str

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PaskError(
                f"{twice[0]!r} appears twice",
                where="methods",
                todo="give one of them a variant or another budget",
            )

    @property
    def digest(self) -> str:
        """sha256 (hex) of all values, defaults included."""
        return digest(asdict(self))

    def select(self, methods: Iterable[str] | None) -> tuple[Entry, ...]:
        """The entries of the named methods (or entry names), all of them for None.

        A registered method that the config does not list raises PaskError, as an unknown one does.
        """
        if methods is None:
            return self.entries
        chosen: list[Entry] = []
        for name in methods:
            # An entry's own name first: one without a knob may have its method's.
            found = [entry for entry in self.entries if name == entry.name]
            found = found or [entry for entry in self.entries if name == entry.method]
            if not found:
                known = sorted({entry.method for entry in self.entries})
                raise PaskError(
                    f"the method {name!r} is not in this run",
                    where=f"run {self.run}",
                    todo=known_names(name, known),
                )
            chosen += [entry for entry in found if entry not in chosen]
        return tuple(chosen)


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """YAML that refuses a key written twice, where the last one would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", node.start_mark
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _is_integer(checker: jsonschema.TypeChecker, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# JSON Schema takes 2.0 for an integer; Python's range() and slices do not.
_VALIDATOR = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


@cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((CONFIGS / "schema.json").read_text(encoding="utf-8"))
    return schema


def _fill_defaults(value: Any, schema: Mapping[str, Any]) -> None:
    """Write the schema's defaults into `value`, in place, also into absent sections."""
    if isinstance(value, dict):
        for key, inner in schema.get("properties", {}).items():
            if key not in value and "default" in inner:
                value[key] = json.loads(json.dumps(inner["default"]))
            if key in value:
                _fill_defaults(value[key], inner)
    elif isinstance(value, list):
        for item in value:
            _fill_defaults(item, schema.get("items", {}))


def _explain(error: jsonschema.ValidationError, where: str) -> PaskError:
    path = ".".join(str(part) for part in error.absolute_path) or "top level"
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema["properties"]
        extra = next(key for key in error.instance if key not in known)
        return PaskError(
            f"unknown key {extra!r} in {path}",
            where=where,
            todo=known_names(str(extra), known),
        )
    return PaskError(f"{path}: {error.message}", where=where, todo="see configs/schema.json")


def _override(raw: dict[str, Any], assignment: str) -> None:
    """Apply `a.b=value` (value in YAML) to the raw config, in place."""
    dotted, equals, text = assignment.partition("=")
    if not equals or not dotted:
        raise PaskError(f"cannot read the override {assignment!r}", todo="write key.key=value")
    *sections, last = dotted.split(".")
    target: Any = raw
    for section in sections:
        target = target.setdefault(section, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise PaskError(f"the override {assignment!r} does not lead to a key of the config")
    if not text.strip():
        raise PaskError(f"the override {assignment!r} gives no value", todo=f"write {dotted}=null")
    try:
        target[last] = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise PaskError(f"cannot read the override {assignment!r}", why=str(error)) from error


def load(path: Path | str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read, override (`model.path=...`), check and complete a run's config.

    Raises PaskError for an unreadable file, a key or value that the schema does not know, a
    method that is not registered, parameters or budgets that it refuses.
    """
    path = Path(path)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except FileNotFoundError:
        there = ", ".join(sorted(str(p) for p in path.parent.glob("*.yaml"))) or "none there"
        raise PaskError(
            "no such config file", where=str(path), todo=f"there are: {there}"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise PaskError("cannot read the config", where=str(path), why=str(error)) from error
    if not isinstance(raw, dict):
        raise PaskError("the config is not a mapping", where=str(path))
    for assignment in overrides:
        _override(raw, assignment)
    validator = _VALIDATOR(_schema())
    invalid = jsonschema.exceptions.best_match(validator.iter_errors(raw))
    if invalid:
        raise _explain(invalid, str(path))
    _fill_defaults(raw, _schema())
    try:
        style_named(raw["model"]["prompt"])
        config = RunConfig(
            run=raw["run"],
            model=ModelConfig(**raw["model"]),
            data=DataConfig(**raw["data"]),
            max_new_tokens=raw["decode"]["max_new_tokens"],
            engine=EngineConfig(**raw["engine"]),
            structure=_structure(**raw["structure"]),
            budget=BudgetConfig(**raw["budget"]),
            entries=tuple(_entries(raw["methods"])),
            paper_model=raw["paper_model"],
        )
    except PaskError as error:
        raise PaskError(str(error), where=str(path)) from error
    return config


def _structure(layer_groups: int | list[int], coarsening: str) -> StructureConfig:
    groups = layer_groups if isinstance(layer_groups, int) else tuple(layer_groups)
    return StructureConfig(groups, coarsening)


def _two_decimals(budget: float) -> str:
    """0.20 for 0.2, but 0.204 for 0.204: no two budgets share a name."""
    short = f"{budget:.2f}"
    return short if float(short) == budget else repr(budget)


def _entries(listed: Iterable[Mapping[str, Any]]) -> Iterable[Entry]:
    from pask.methods.registry import make_method  # torch is slow to import: only once needed

    for item in listed:
        method = make_method(item["name"], None, item["params"])
        for wanted in item.get("budgets", [method.budget]):
            if not method.has_knob and wanted != method.budget:
                raise PaskError(
                    f"method {method.name}: budget {wanted}, but its bytes are what they are",
                    todo="leave budgets out for a method without a knob",
                )
            # A budget outside the method's range stays an entry: the tables say not reachable.
            entry = Entry("", method.name, wanted, item["params"], item.get("variant", ""))
            budget = f"@{_two_decimals(wanted)}" if method.has_knob else ""
            yield replace(entry, name=f"{entry.family}{budget}")
