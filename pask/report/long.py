"""The long table, one row an item and method entry: what every table and figure is made from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from pask.config import Entry
from pask.errors import HarnessFault, PaskError

TEXT = (
    "model", "split", "method", "label", "entry", "id",
    "category", "cluster", "error_type", "finish", "notes",
)  # fmt: skip
NUMBERS = (
    "budget", "correct", "prompt_tokens", "new_tokens",
    "resident_prompt_bytes", "resident_decode_bytes", "full_bytes", "full_prompt_bytes",
    "resident_byte_steps", "read_byte_steps", "full_byte_steps",
)  # fmt: skip


# Empty for a method without a knob; `b_development` where a knob was not searched either.
OPTIONAL = ("nominal", "b_development")


def read_long(path: Path) -> pd.DataFrame:
    """Read `long.csv`; empty text stays empty text. Raises PaskError where it is not one."""
    if not path.is_file():
        raise PaskError("there is no long table", where=str(path), todo="run the evaluation first")
    try:
        columns = pd.read_csv(path, nrows=0).columns
        missing = [name for name in TEXT + NUMBERS + OPTIONAL if name not in columns]
        if missing:
            raise PaskError(f"the long table lacks {', '.join(missing)}", where=str(path))
        return pd.read_csv(
            path,
            dtype=dict.fromkeys(TEXT, str),
            keep_default_na=False,
            na_values={name: [""] for name in NUMBERS + OPTIONAL},
        )
    except ValueError as error:
        raise PaskError(f"not a long table: {error}", where=str(path)) from error


def entries_of(long: pd.DataFrame) -> list[Entry]:
    """The entries that have rows, in order of appearance."""
    seen = long.drop_duplicates("entry")
    return [
        Entry(name, method, float(budget), {})
        for name, method, budget in zip(seen["entry"], seen["method"], seen["budget"], strict=True)
    ]


def labels_of(long: pd.DataFrame) -> dict[str, str]:
    """Method name -> printed label, for the methods that have rows."""
    return dict(zip(long["method"], long["label"], strict=True))


def check_long(long: pd.DataFrame, sizes: Mapping[str, int], entries: Sequence[Entry]) -> None:
    """Raise HarnessFault unless the table holds each entry whole, or not at all.

    Whole: for every category exactly `sizes[category]` rows, no id twice, the same ids and clusters
    for all entries, `correct` 0 or 1, an error type on every wrong row, no byte count missing. One
    table is one model on one split.
    """
    missing = [name for name in TEXT + NUMBERS if name not in long.columns]
    if missing:
        raise HarnessFault(f"the long table lacks {', '.join(missing)}")
    if long.empty:
        raise HarnessFault("the long table is empty", todo="run the evaluation first")
    for name in ("model", "split"):
        if long[name].nunique() != 1:
            raise HarnessFault(f"one long table, several {name}s", why=_some(long[name].unique()))
    _none_of(set(long["entry"]) - {entry.name for entry in entries}, "entries not in the config")
    _none_of(set(long["category"]) - {c for c, n in sizes.items() if n}, "rows outside the split")
    _none_of(long.loc[~long["correct"].isin((0, 1)), "id"], "`correct` is neither 0 nor 1")
    _none_of(long.loc[long[list(NUMBERS)].isna().any(axis=1), "id"], "a number is missing")
    wrong_without_reason = (long["correct"] == 0) & (long["error_type"].fillna("") == "")
    _none_of(long.loc[wrong_without_reason, "id"], "wrong, but without an error type")
    reference: pd.DataFrame | None = None
    for entry in entries:
        rows = long[long["entry"] == entry.name]
        if rows.empty:
            continue
        where = f"entry {entry.name}"
        _none_of(rows.loc[rows["id"].duplicated(), "id"], "the same id twice", where)
        for category, n in sizes.items():
            k = int((rows["category"] == category).sum())
            if k != n:
                raise HarnessFault(
                    f"{category} is not complete: {k} of {n}",
                    where=where,
                    todo="run the evaluation again; it resumes",
                )
        items = rows.set_index("id")[["category", "cluster"]].sort_index()
        if reference is None:
            reference = items
        elif not items.equals(reference):
            both = items.merge(reference, how="outer", left_index=True, right_index=True)
            odd = both[
                (both["category_x"] != both["category_y"])
                | (both["cluster_x"] != both["cluster_y"])
            ]
            _none_of(odd.index, "other items than the first entry's", where)


def _none_of(names: Iterable[str], what: str, where: str = "long table") -> None:
    names = sorted(set(names))
    if names:
        raise HarnessFault(what, where=where, why=_some(names))


def _some(names: Iterable[str]) -> str:
    names = [str(name) for name in names]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
