"""Which rows calibrate, which choose knobs (dev) and which are reported (test).

Two kinds. "paper" has the paper's sizes: cal and dev get a fifth of each subset each, shared among
its categories by largest remainder, and test the rest (non-live 240/120/120/120, live
154/633/10/14). Rows of one tool set then fall into several parts. "group" keeps every tool set and
every question inside one part, and comes as near to those sizes as that allows.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pask.bfcl.data import CATEGORIES, SUBSETS, Row, data_digest
from pask.digests import canonical, digest, sha256
from pask.errors import PaskError
from pask.files import write_text

PARTS = ("cal", "dev", "test")
KINDS = ("paper", "group")
SCHEMA = "pask-splits-1"

Ids = dict[str, tuple[str, ...]]  # category -> row ids


@dataclass(frozen=True)
class Splits:
    """The rows of each part by category, in the seeded order that samples are cut from.

    `data_digest` names the data files the ids belong to. Raises PaskError if the kind or the parts
    are unknown or a row is in two places.
    """

    kind: str
    seed: int
    data_digest: str
    parts: dict[str, Ids]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PaskError(f"unknown split kind {self.kind!r}", todo="choose paper or group")
        if tuple(self.parts) != PARTS:
            raise PaskError("a split has the parts cal, dev and test, in this order")
        everywhere = Counter(
            row for part in PARTS for ids in self.parts[part].values() for row in ids
        )
        if twice := sorted(row for row, count in everywhere.items() if count > 1):
            raise PaskError("the row is in two places of the split", where=twice[0])

    @property
    def digest(self) -> str:
        """SHA-256 of the content: equal digests mean equal rows in equal order."""
        return digest(self._content())

    def ids(self, part: str, categories: Iterable[str] = CATEGORIES) -> tuple[str, ...]:
        """Row ids of a part, category by category; PaskError for an unknown part or category."""
        return tuple(row for category in categories for row in self._rows(part, category))

    def sizes(self, part: str) -> dict[str, int]:
        """Rows of a part by category: the denominators of every accuracy."""
        return {category: len(ids) for category, ids in self._part(part).items()}

    def sample(self, part: str, sizes: Mapping[str, int] | None = None) -> Ids:
        """The first `sizes[category]` rows of each category named; all rows for `sizes` None.

        A larger sample contains the smaller one. Raises PaskError if a category has fewer rows.
        """
        if sizes is None:
            return dict(self._part(part))
        for category, size in sizes.items():
            there = len(self._rows(part, category))
            if not 0 <= size <= there:
                raise PaskError(
                    f"{size} rows asked of {category}, there are {there}",
                    where=f"sample of {part}",
                    todo=f"ask for 0 to {there}",
                )
        return {
            category: ids[: sizes[category]]
            for category, ids in self._part(part).items()
            if category in sizes
        }

    def write(self, path: Path) -> None:
        """Write the split file, readable JSON that carries its digest, in one step."""
        text = json.dumps(self._content() | {"digest": self.digest}, indent=1, ensure_ascii=False)
        write_text(path, text + "\n")

    @classmethod
    def read(cls, path: Path) -> Splits:
        """Read a split file; PaskError if it is torn, edited, or made for other data."""

        def refuse(what: str, why: str = "") -> PaskError:
            return PaskError(what, where=str(path), why=why, todo="make the split file again")

        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise refuse("cannot read the split file", error.strerror or str(error)) from error
        except ValueError as error:
            raise refuse("the split file is not JSON", str(error)) from error
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise refuse(f"not a split file of schema {SCHEMA}")
        written = content.pop("digest", None)
        if written != digest(content):
            raise refuse("the split file was edited: its content does not give its digest")
        if content["data_digest"] != data_digest():
            raise refuse(
                "the split file belongs to other BFCL data",
                f"its data digest is {content['data_digest']}, ours {data_digest()}",
            )
        parts = {
            part: {category: tuple(ids) for category, ids in by_category.items()}
            for part, by_category in content["parts"].items()
        }
        return cls(**{f.name: content[f.name] for f in fields(cls)} | {"parts": parts})

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "seed": self.seed,
            "data_digest": self.data_digest,
            "parts": self.parts,
        }

    def _part(self, part: str) -> Ids:
        if part not in PARTS:
            raise PaskError(f"unknown part {part!r} of the split", todo="choose cal, dev or test")
        return self.parts[part]

    def _rows(self, part: str, category: str) -> tuple[str, ...]:
        if category not in CATEGORIES:
            raise PaskError(
                f"unknown BFCL category {category!r}", todo="choose from " + ", ".join(CATEGORIES)
            )
        return self._part(part).get(category, ())


def build_splits(rows: Mapping[str, Row], kind: str, seed: int) -> Splits:
    """Split the rows; the same for every order of `rows`. PaskError for an unknown kind."""
    sizes = paper_sizes(Counter(row.category for row in rows.values()))
    order = sorted(rows, key=lambda row_id: sha256(f"{seed}:{row_id}"))
    if kind == "group":
        part_of = _assign_groups(rows, order, sizes)
    elif kind == "paper":
        part_of = _assign_rows(rows, order, sizes)
    else:
        raise PaskError(f"unknown split kind {kind!r}", todo="choose paper or group")
    present = [c for c in CATEGORIES if c in sizes["test"]]
    parts = {
        part: {
            category: tuple(i for i in order if part_of[i] == part and rows[i].category == category)
            for category in present
        }
        for part in PARTS
    }
    return Splits(kind, seed, data_digest(), parts)


def paper_sizes(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Rows per part and category by the paper's rule, from the category counts.

    In each subset of N rows cal and dev get T = N / 5 (rounded) rows: floor(T n_c / N) for a
    category of n_c rows, and one more for the largest remainders. Test gets what is left.
    """
    sizes: dict[str, dict[str, int]] = {part: {} for part in PARTS}
    for names in SUBSETS.values():
        subset = {c: counts[c] for c in names if counts.get(c)}
        total = sum(subset.values())
        fifth = (2 * total + 5) // 10
        share = {c: fifth * n // total for c, n in subset.items()}
        by_remainder = sorted(subset, key=lambda c: -(fifth * subset[c] % total))
        for category in by_remainder[: fifth - sum(share.values())]:
            share[category] += 1
        for category, n in subset.items():
            for part in ("cal", "dev"):
                sizes[part][category] = share[category]
            sizes["test"][category] = n - 2 * share[category]
    return sizes


def tool_names(row: Row) -> str:
    """A key equal for rows with the same tools, whatever their order or the docs' wording."""
    return canonical(sorted(function["name"] for function in row.functions))


def question(row: Row) -> str:
    """The text of the user's turns, without differences of case, spacing or Unicode form."""
    text = " ".join(m["content"] for m in row.messages if m["role"] == "user")
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


LEAKS: dict[str, Callable[[Row], str]] = {
    "tool_set": lambda row: row.cluster,
    "tool_names": tool_names,
    "question": question,
}


def leaks(splits: Splits, rows: Mapping[str, Row]) -> dict[str, dict[str, int]]:
    """Test rows that share something with a row of cal or dev, by category.

    Each value holds "rows" (test rows), "tool_set" (identical function docs), "tool_names" (the
    same tools, perhaps worded otherwise), "question" (the same text) and "any" of them.
    """
    seen = {
        kind: {key(rows[i]) for part in ("cal", "dev") for i in splits.ids(part)}
        for kind, key in LEAKS.items()
    }
    report = {}
    for category, ids in splits.parts["test"].items():
        shared = [{kind for kind, key in LEAKS.items() if key(rows[i]) in seen[kind]} for i in ids]
        report[category] = {
            "rows": len(ids),
            **{k: sum(k in s for s in shared) for k in LEAKS},
            "any": sum(map(bool, shared)),
        }
    return report


def _assign_rows(
    rows: Mapping[str, Row], order: list[str], sizes: dict[str, dict[str, int]]
) -> dict[str, str]:
    by_category: dict[str, list[str]] = defaultdict(list)
    for row_id in order:
        by_category[rows[row_id].category].append(row_id)
    part_of: dict[str, str] = {}
    for category, ids in by_category.items():
        parts = [part for part in PARTS for _ in range(sizes[part][category])]
        part_of |= dict(zip(ids, parts, strict=True))
    return part_of


def _assign_groups(
    rows: Mapping[str, Row], order: list[str], sizes: dict[str, dict[str, int]]
) -> dict[str, str]:
    """Whole groups, the largest first, each to the part that is emptiest for its categories."""
    filled: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    part_of: dict[str, str] = {}
    for group in sorted(_groups(rows, order), key=len, reverse=True):
        adds = Counter(rows[i].category for i in group)

        def growth(part: str, adds: Counter[str] = adds) -> float:
            """How much the summed (filled - wanted)^2 / wanted would grow; lowest is best."""
            return sum(
                n * (n + 2 * filled[part][c]) / max(sizes[part][c], 1) - 2 * n
                for c, n in adds.items()
            )

        best = min(PARTS, key=growth)
        filled[best] += adds
        part_of |= dict.fromkeys(group, best)
    return part_of


def _groups(rows: Mapping[str, Row], order: list[str]) -> list[list[str]]:
    """Rows linked, directly or through others, by a tool set or a question; in seeded order."""
    parent = {row_id: row_id for row_id in order}

    def root(row_id: str) -> str:
        while parent[row_id] != row_id:
            parent[row_id] = parent[parent[row_id]]
            row_id = parent[row_id]
        return row_id

    first: dict[tuple[str, str], str] = {}
    for row_id in order:
        for kind, key in LEAKS.items():
            parent[root(row_id)] = root(first.setdefault((kind, key(rows[row_id])), row_id))
    groups: dict[str, list[str]] = defaultdict(list)
    for row_id in order:
        groups[root(row_id)].append(row_id)
    return list(groups.values())
