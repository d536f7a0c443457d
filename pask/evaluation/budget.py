"""Finds the value of each method's knob at which it holds the bytes that a run asks for.

The bytes are counted on development rows, along Full KV's answers to them (`dry_run`). What is
found is written to results/<run>/budgets/<entry>.json and stays as it is for whatever part is
evaluated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pask.bfcl.data import data_digest, load_rows, subset_of
from pask.bfcl.request import RequestBuilder
from pask.calibration.families import policy_families
from pask.calibration.policies import read_family_policy
from pask.calibration.run import read_calibration
from pask.config import Entry, RunConfig
from pask.digests import digest
from pask.engine import trajectories
from pask.engine.generation import Limits
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import ModelFiles, tokenizer_info
from pask.errors import PaskError
from pask.evaluation.dry_run import Case, Counted, count
from pask.evaluation.keys import RESULTS, read_splits
from pask.evaluation.model import load_files
from pask.evaluation.search import search
from pask.evaluation.trajectories import header_of, trajectory_file
from pask.files import write_json
from pask.methods.contract import Method
from pask.methods.registry import make_method, method_class
from pask.policy.policy import Policy
from pask.provenance import source_digest, versions

PART = "dev"

_CLOSE = 0.2  # of the tolerance: how near a search wants to come before it ends


@dataclass(frozen=True)
class Setting:
    """What was found for an entry. `status`: "met", "not reachable", or "fixed" for a method
    without a knob; `reached`: B_persist on the rows, of which `unreachable` are held above what the
    knob asks; `tried`: all (knob, B_persist) pairs in order; `nominal` None: no knob, or none
    that reaches the budget."""

    entry: str
    budget: float
    status: str
    nominal: float | None
    reached: float | None
    rows: int
    unreachable: int
    tried: tuple[tuple[float, float], ...]
    why: str  # of "not reachable"

    def __post_init__(self) -> None:
        if self.status not in ("met", "not reachable", "fixed"):
            raise ValueError(f"status {self.status!r}")
        if (self.status == "met") != isinstance(self.nominal, float):
            raise ValueError(f"{self.status}, with the knob at {self.nominal!r}")


def measured_fields(
    config: RunConfig, model_digest: str, entries: Sequence[Entry]
) -> Mapping[str, Mapping[str, Any]]:
    """By family: the fields that calibration gave its method, a policy among them; errors as of
    reading it."""
    fields: dict[str, Mapping[str, Any]] = {}
    if any(method_class(entry.method).calibrated for entry in entries):
        fields |= read_calibration(config, model_digest)
    following = policy_families(config)
    for entry in entries:
        if entry.family in following and entry.family not in fields:
            fields[entry.family] = {"policy": read_family_policy(config, entry, model_digest)}
    return fields


def setting_file(config: RunConfig, entry: Entry) -> Path:
    return RESULTS / config.run / "budgets" / f"{entry.name}.json"


def decided_by(
    config: RunConfig, entry: Entry, model_digest: str, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """All that a setting depends on; `measured` are the fields from the method's calibration."""
    ids = read_splits(config).sample(PART, config.data.sample_of(PART))
    return {
        "method": entry.method,
        "params": dict(entry.params),
        "measured": digest(
            {k: v.digest if isinstance(v, Policy) else v for k, v in measured.items()}
        ),
        "budget": entry.budget,
        "tolerance": config.budget.tolerance,
        "rows": digest([row_id for group in ids.values() for row_id in group]),
        "model": model_digest,
        "prompt": config.model.prompt,
        "answer_form": config.model.answer_form,
        "expected_new_tokens": dict(config.model.expected_new_tokens),
        "max_new_tokens": config.max_new_tokens,
        "kv_dtype": config.engine.kv_dtype,
        "page_slots": config.engine.page_slots,
        "data": data_digest(),
        "versions": versions(),
        "source": source_digest("pask.evaluation.budget", method_class(entry.method).__module__),
    }


def read(
    config: RunConfig, entry: Entry, model_digest: str, measured: Mapping[str, Any]
) -> Setting:
    """An entry's setting; PaskError where it was not searched, or for something else."""
    path = setting_file(config, entry)
    todo = "run pask budget (or snakemake)"
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        made = dict(found.pop("decided_by"))
        found["tried"] = tuple((knob, share) for knob, share in found["tried"])
        setting = Setting(**found)
    except FileNotFoundError:
        raise PaskError("the knob was not searched yet", where=str(path), todo=todo) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise PaskError("the file is damaged", where=str(path), why=why, todo=todo) from error
    wanted = json.loads(json.dumps(decided_by(config, entry, model_digest, measured)))
    other = sorted(key for key in wanted if made.get(key) != wanted[key])
    if other:
        what = f"the knob was searched under another {', '.join(other)}"
        raise PaskError(what, where=str(path), todo=todo)
    return setting


def find_settings(config: RunConfig, methods: Sequence[str] | None = None) -> Iterator[Setting]:
    """Search the knobs of the run's entries (or those of `methods`) and write what is found, one
    by one.

    An entry whose file is there and was made for the same is not searched again. PaskError for
    whatever is missing: the split, Full KV's answers, a calibration.
    """
    entries = config.select(methods)
    model = load_files(config)
    measured = measured_fields(config, model.digest, entries)
    cases: list[Case] = []
    for entry in entries:
        fields = measured.get(entry.family, {})
        try:
            setting = read(config, entry, model.digest, fields)
        except PaskError:
            cases = cases or _cases(config, model)
            setting = _find(config, entry, fields, model, cases)
            about = {"decided_by": decided_by(config, entry, model.digest, fields)}
            write_json(setting_file(config, entry), asdict(setting) | about)
        yield setting


def _cases(config: RunConfig, model: ModelFiles) -> list[Case]:
    """The development rows with Full KV's answers to them."""
    rows = load_rows()
    groups = read_splits(config).sample(PART, config.data.sample_of(PART))
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    header = header_of(config, model.digest, model.layout.vocab_size)
    answers = trajectories.read(trajectory_file(config, PART), header)
    cases = []
    for row_id in (row_id for group in groups.values() for row_id in group):
        request = builder.build(rows[row_id])
        answer = answers.of(request)
        expected = config.model.expected_new_tokens[subset_of(rows[row_id].category)]
        cases.append(Case(request, answer.token_ids, answer.finish == "length", expected))
    return cases


def _find(
    config: RunConfig,
    entry: Entry,
    fields: Mapping[str, Any],
    model: ModelFiles,
    cases: Sequence[Case],
) -> Setting:
    cls = method_class(entry.method)
    low, high = cls.budgets
    if not low <= entry.budget <= high:
        why = f"{entry.method} holds {low:g} to {high:g}"
        return Setting(
            entry.name, entry.budget, "not reachable", None, None, len(cases), 0, (), why
        )
    method = make_method(entry.method, entry.budget, entry.params, measured=fields)
    counted: dict[float, Counted] = {}

    def at(one: Method) -> Counted:
        limits, engine = Limits(config.max_new_tokens), config.engine
        return count(model, one, cases, limits, KV_DTYPES[engine.kv_dtype], engine.page_slots)

    def measure(knob: float) -> float:
        counted[knob] = at(dataclasses.replace(method, nominal=knob))
        return counted[knob].share

    if not method.has_knob:
        fixed = at(method)
        return Setting(entry.name, entry.budget, "fixed", None, fixed.share, len(cases), 0, (), "")
    found = search(
        measure,
        start=method.setting,
        bounds=cls.knob_range,
        target=entry.budget,
        close=_CLOSE * config.budget.tolerance,
    )
    knob, share = found.best
    met = abs(share - entry.budget) <= config.budget.tolerance
    return Setting(
        entry=entry.name,
        budget=entry.budget,
        status="met" if met else "not reachable",
        nominal=knob if met else None,
        reached=share,
        rows=len(cases),
        unreachable=counted[knob].unreachable,
        tried=found.tried,
        why="" if met else f"the nearest is {share:.4f}, at {knob:g}",
    )
