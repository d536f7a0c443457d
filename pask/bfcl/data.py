"""The BFCL rows, read straight from the installed `bfcl-eval` package.

`bfcl_eval` itself is never imported here: reading its JSON needs none of its dependencies, and its
own loader makes folders beside the package and opens files in the locale's encoding.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pask.digests import digest, sha256
from pask.errors import PaskError

SUBSETS: dict[str, tuple[str, ...]] = {
    "nonlive": ("simple_python", "multiple", "parallel", "parallel_multiple"),
    "live": ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
}
CATEGORIES: tuple[str, ...] = SUBSETS["nonlive"] + SUBSETS["live"]


@dataclass(frozen=True)
class Row:
    """One BFCL test case, as the files have it.

    `messages`: the chat turns, each {"role", "content"}; `functions`: the tool docs with BFCL's own
    type names; `gold`: one {function_name: {argument: [alternatives]}} per expected call, where the
    alternative "" says that the argument may be left out. Raises PaskError on any other shape.
    """

    id: str
    category: str
    messages: tuple[dict[str, str], ...]
    functions: tuple[dict[str, Any], ...]
    gold: tuple[dict[str, dict[str, list[Any]]], ...]

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES or not self.id.startswith(f"{self.category}_"):
            raise PaskError(f"row id does not belong to category {self.category!r}", where=self.id)
        if not self.messages or any(set(m) != {"role", "content"} for m in self.messages):
            raise PaskError("messages must each hold a role and a content", where=self.id)
        if not self.functions or any(
            "name" not in f or "parameters" not in f for f in self.functions
        ):
            raise PaskError("functions must each hold a name and parameters", where=self.id)
        if not self.gold or any(len(call) != 1 for call in self.gold):
            raise PaskError("the gold answer must be calls of one function each", where=self.id)

    @cached_property
    def cluster(self) -> str:
        """16 hex digits naming the tool set: rows with identical function docs share it."""
        return digest(self.functions)[:16]


@cache
def pinned() -> dict[str, Any]:
    """The package version this project reads and the SHA-256 of each of its files used here."""
    pins: dict[str, Any] = json.loads(
        Path(__file__).with_name("digests.json").read_text(encoding="utf-8")
    )
    return pins


@cache
def data_digest() -> str:
    """One digest that names all sixteen data files; split and ceiling files carry it."""
    return digest(pinned()["data"])


def subset_of(category: str) -> str:
    """The subset ("nonlive" or "live") that a category belongs to."""
    return next(subset for subset, names in SUBSETS.items() if category in names)


def package_root() -> Path:
    """Folder of the installed `bfcl_eval`; PaskError with the install command if there is none."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise PaskError(
            "the BFCL data package is not installed", where="bfcl_eval", todo=_install_hint()
        )
    return Path(next(iter(spec.submodule_search_locations)))


def read_pinned(path: Path, expected: str) -> bytes:
    """A file's bytes, if their SHA-256 is `expected`; else PaskError with both digests."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PaskError(
            "cannot read the BFCL file",
            where=str(path),
            why=error.strerror or str(error),
            todo=_install_hint(),
        ) from error
    found = sha256(content)
    if found != expected:
        raise PaskError(
            "the BFCL file is not the pinned one",
            where=str(path),
            why=f"expected sha256 {expected}, found {found}",
            todo=_install_hint(),
        )
    return content


def load_rows(categories: Iterable[str] = CATEGORIES, root: Path | None = None) -> dict[str, Row]:
    """All rows of the categories by id, in file order, the categories in the order given.

    `root` is a folder laid out like the package's `data` (default: the installed package's own).
    Raises PaskError for an unknown category, a missing package or file, a wrong digest, or data
    that is not what it should be.
    """
    folder = package_root() / "data" if root is None else root
    digests = pinned()["data"]
    rows: dict[str, Row] = {}
    for category in categories:
        if category not in CATEGORIES:
            raise PaskError(
                f"unknown BFCL category {category!r}", todo="choose from " + ", ".join(CATEGORIES)
            )
        questions, answers = f"BFCL_v4_{category}.json", f"possible_answer/BFCL_v4_{category}.json"
        rows |= parse_rows(
            category,
            read_pinned(folder / questions, digests[questions]),
            read_pinned(folder / answers, digests[answers]),
        )
    return rows


def parse_rows(category: str, questions: bytes, answers: bytes) -> dict[str, Row]:
    """Rows of one category from the contents of its two files; PaskError where they disagree."""
    gold = _by_id(f"answers of {category}", answers)
    rows = {}
    for row_id, entry in _by_id(f"questions of {category}", questions).items():
        if row_id not in gold:
            raise PaskError("a question without an answer", where=f"{category}, {row_id}")
        if len(entry["question"]) != 1:
            raise PaskError("a row of more than one turn", where=f"{category}, {row_id}")
        rows[row_id] = Row(
            row_id,
            category,
            tuple(entry["question"][0]),
            tuple(entry["function"]),
            tuple(gold[row_id]["ground_truth"]),
        )
    if left := sorted(gold.keys() - rows.keys()):
        raise PaskError("an answer without a question", where=f"{category}, {left[0]}")
    return rows


def _by_id(where: str, content: bytes) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise PaskError(
                "not a JSON object", where=f"{where}, line {number}", why=str(error)
            ) from error
        if entry["id"] in entries:
            raise PaskError(f"the id {entry['id']} occurs twice", where=f"{where}, line {number}")
        entries[entry["id"]] = entry
    return entries


def _install_hint() -> str:
    package = f"{pinned()['package']}=={pinned()['version']}"
    return f"install it by: pip install --force-reinstall --no-deps {package}"
