"""The rows that no output can pass, so that a table can print its ceiling beside its accuracy.

Two reasons are kept apart. "checker": the official checker refuses every answer, whatever the
output format (an argument without any right value, a required argument that the gold answer does
not know). "grammar": some answer would pass, but none that the constrained output can spell (the
right value outside the document's enumeration, of another type, under an undeclared key). Nothing
is repaired: such rows stay in every denominator.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pask.bfcl.answers import Call
from pask.bfcl.checker import check
from pask.bfcl.data import Row, data_digest
from pask.errors import HarnessFault, PaskError
from pask.files import write_text

Accepts = Callable[[Row, list[Call]], bool]  # can the row's constrained output be these calls?
Spellings = Callable[[Any, Mapping[str, Any]], Iterator[Any]]

REASONS = ("checker", "grammar")
SCHEMA = "pask-ceiling-1"
MAX_TRIED = 2000  # spellings of one argument; a search that ends there is no proof and raises

_LEFT_OUT = object()  # the "value" of an argument that the answer does not give


@dataclass(frozen=True)
class Unpassable:
    """A row no output can pass; `detail` names the function, the argument and what was refused."""

    id: str
    category: str
    reason: str
    detail: str

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise PaskError(f"unknown reason {self.reason!r}", where=self.id)


@dataclass(frozen=True)
class Ceiling:
    """The unpassable rows of the data named by `data_digest`, sorted by id."""

    data_digest: str
    rows: tuple[Unpassable, ...]

    def passable(self, ids: Iterable[str]) -> int:
        """How many of the rows some grammar-legal output can pass."""
        listed = {row.id for row in self.rows}
        return sum(row_id not in listed for row_id in ids)

    def write(self, path: Path) -> None:
        """Write the ceiling file, one row a line, in one step."""
        rows = ",\n".join("  " + json.dumps(asdict(row), ensure_ascii=False) for row in self.rows)
        head = f'{{\n "schema": "{SCHEMA}",\n "data_digest": "{self.data_digest}",\n'
        write_text(path, f'{head} "rows": [\n{rows}\n ]\n}}\n')

    @classmethod
    def read(cls, path: Path) -> Ceiling:
        """Read a ceiling file; PaskError if it is unreadable or made for other data."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema is {content['schema']!r}, not {SCHEMA!r}")
            ceiling = cls(content["data_digest"], tuple(Unpassable(**r) for r in content["rows"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PaskError(
                "cannot read the ceiling file",
                where=str(path),
                why=str(error),
                todo="make it again or take the committed one",
            ) from error
        if ceiling.data_digest != data_digest():
            raise PaskError(
                "the ceiling file belongs to other BFCL data", where=str(path), todo="make it again"
            )
        return ceiling


def spellable(row: Row, calls: list[Call]) -> bool:
    """Whether the row's grammar holds the calls; both answer forms hold the same ones."""
    # imported here: reading a ceiling file must not cost an xgrammar import
    from pask.bfcl.answers import render
    from pask.bfcl.grammar import accepts

    return accepts(row.functions, render(calls, "json_list", row.functions), "json_list")


def measure_ceiling(rows: Mapping[str, Row], accepts: Accepts = spellable) -> Ceiling:
    """Search every row for a passing answer that `accepts` allows (about 5 ms a row)."""
    found = (passing_answer(rows[row_id], accepts) for row_id in sorted(rows))
    return Ceiling(data_digest(), tuple(f for f in found if isinstance(f, Unpassable)))


def passing_answer(row: Row, accepts: Accepts = spellable) -> list[Call] | Unpassable:
    """An answer that passes the checker and the grammar, or why there is none.

    First choice is every argument's first gold alternative, optional ones included; then its other
    alternatives, leaving it out, and the document's enumeration. The search goes argument by
    argument, since checker and schema judge each alone; that the parts make a passing whole is
    verified. Raises HarnessFault if they do not, or if a search had to be cut short.
    """
    answer = _search(row, lambda *_: True)
    if isinstance(answer, Unpassable) or accepts(row, answer):
        return answer
    answer = _search(row, accepts)
    if isinstance(answer, Unpassable) or accepts(row, answer):
        return answer
    raise HarnessFault("the grammar takes each argument but not the whole answer", where=row.id)


def _search(row: Row, accepts: Accepts) -> list[Call] | Unpassable:
    documents = {function["name"]: function for function in row.functions}
    answer: list[Call] = []
    for gold in row.gold:
        ((name, arguments),) = gold.items()
        properties = documents[name]["parameters"]["properties"]
        required = documents[name]["parameters"]["required"]
        call: dict[str, Any] = {}
        for argument in dict.fromkeys((*properties, *required, *arguments)):
            if argument not in arguments and argument not in required:
                continue
            alone = _only(row, documents[name], gold, argument)
            value = _value(alone, name, argument, accepts)
            if isinstance(value, Unpassable):
                return value
            if value is not _LEFT_OUT:
                call[argument] = value
        answer.append({name: call})
    verdict = check(row, answer)
    if not verdict.correct:
        raise HarnessFault(
            "the checker takes each argument but not the whole answer",
            where=row.id,
            why=verdict.error,
        )
    return answer


def _only(row: Row, document: dict[str, Any], gold: Call, argument: str) -> Row:
    """The row as if the call had this one argument."""
    ((name, arguments),) = gold.items()
    parameters = document["parameters"]
    narrowed = {
        **parameters,
        "properties": {k: v for k, v in parameters["properties"].items() if k == argument},
        "required": [k for k in parameters["required"] if k == argument],
    }
    return replace(
        row,
        functions=({**document, "parameters": narrowed},),
        gold=({name: {k: v for k, v in arguments.items() if k == argument}},),
    )


def _value(row: Row, name: str, argument: str, accepts: Accepts) -> Any:
    """The first value of a one-argument row that passes, _LEFT_OUT, or why there is none."""
    document = row.functions[0]["parameters"]["properties"].get(argument, {})
    alternatives = row.gold[0][name].get(argument, [])
    passed_checker = []
    for tried, value in enumerate(_candidates(alternatives, document, _spellings)):
        if tried == MAX_TRIED:
            raise HarnessFault(f"over {MAX_TRIED} spellings of {name}, {argument}", where=row.id)
        calls: list[Call] = [{name: {} if value is _LEFT_OUT else {argument: value}}]
        if check(row, calls).correct:
            if accepts(row, calls):
                return value
            passed_checker.append(value)
    if passed_checker:
        refused = "leaving it out" if passed_checker[0] is _LEFT_OUT else repr(passed_checker[0])
        return Unpassable(
            row.id, row.category, "grammar", f"{name}, {argument}: the grammar refuses {refused}"
        )
    return Unpassable(
        row.id,
        row.category,
        "checker",
        f"{name}, {argument}: the checker refuses every value and its omission",
    )


def _candidates(
    alternatives: list[Any], document: Mapping[str, Any], spellings: Spellings
) -> Iterator[Any]:
    """Every value worth trying for one argument or dict key, the gold's first choice first."""
    for alternative in alternatives:
        if alternative != "":
            yield from spellings(alternative, document)
    yield _LEFT_OUT
    yield ""  # passes where "" stands for omission, and serves a required key
    yield []
    yield from document.get("enum") or ()  # equal to the gold once case and punctuation are gone


def _spellings(gold: Any, document: Mapping[str, Any]) -> Iterator[Any]:
    """The outputs that the checker may take for one gold alternative of an argument."""
    if isinstance(gold, dict):  # its values are lists of alternatives, deeper ones are plain values
        properties = document.get("properties", {})
        choices = [list(_candidates(gold[k], properties.get(k, {}), _plain)) for k in gold]
        for values in itertools.product(*choices):
            yield {k: v for k, v in zip(gold, values, strict=True) if v is not _LEFT_OUT}
    elif isinstance(gold, list) and gold and all(isinstance(item, dict) for item in gold):
        items = document.get("items", {})
        yield from map(list, itertools.product(*(list(_spellings(i, items)) for i in gold)))
    yield from _plain(gold, document)


def _plain(value: Any, document: Mapping[str, Any]) -> Iterator[Any]:
    """The value, then the value with numbers as the document declares them."""
    yield value
    yield _retyped(value, document)


def _retyped(value: Any, document: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_retyped(item, document.get("items", {})) for item in value]
    if isinstance(value, dict):
        properties = document.get("properties", {})
        return {key: _retyped(item, properties.get(key, {})) for key, item in value.items()}
    declared = document.get("type")
    if isinstance(value, float) and declared == "integer" and value.is_integer():
        return int(value)
    if isinstance(value, int) and declared in ("integer", "float"):  # True is 1 to the checker
        return int(value) if declared == "integer" else float(value)
    return value
