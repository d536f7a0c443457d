"""Methods of one target against each other: which of two is right more often at equal bytes.

The accuracy table pairs every entry with Full KV; here each pairs with every other of its target.
Percentages stay unrounded in the frame, as in `pask.report.tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import isnan
from typing import Any

import pandas as pd

from pask.bfcl.data import SUBSETS
from pask.report.blocks import SMALL_CELL, SUBSET_NAMES, Block, Cell, Line, entry_names, signed
from pask.report.statistics import RESAMPLES, SEED, holm, mcnemar, paired_difference, rounded

COLUMNS = (
    "model", "split", "subset", "budget", "entry", "other", "b_persist", "other_b_persist", "n",
    "only_entry", "only_other", "diff_pp", "diff_low", "diff_high", "clusters", "mcnemar_p",
    "holm_p", "smoke",
)  # fmt: skip
COUNTS = ("n", "only_entry", "only_other", "clusters")


def pair_table(long: pd.DataFrame, accuracy: pd.DataFrame) -> pd.DataFrame:
    """One row a pair of entries of one target and subset, in the accuracy table's order.

    `accuracy` is `pask.report.tables.accuracy_table` of the same long table. Only entries whose
    knob aims at a target are paired. `only_entry`, `only_other`: rows that one of the two alone got
    right; `diff_pp` is the entry's accuracy less the other's, with its paired cluster-bootstrap
    interval; `mcnemar_p` is exact, `holm_p` adjusted over the pairs of this target and subset.
    Without a pair it has no rows.
    """
    records: list[dict[str, Any]] = []
    for subset, categories in SUBSETS.items():
        rows = long[long["category"].isin(categories)].sort_values("id")
        answers = {str(entry): group for entry, group in rows.groupby("entry")}
        overall = accuracy[accuracy["category"] == f"{subset}_overall"]
        aimed = overall[overall["nominal"].notna()]
        for _, entries in aimed.groupby("budget", sort=False):
            found = [
                _pair(one, other, answers)
                for one, other in combinations(entries.to_dict("records"), 2)
            ]
            adjusted = holm([pair["mcnemar_p"] for pair in found])
            records += [pair | {"holm_p": p} for pair, p in zip(found, adjusted, strict=True)]
    frame = pd.DataFrame(records, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(COUNTS, "Int64") | {"budget": float})


def _pair(one: Any, other: Any, answers: dict[str, pd.DataFrame]) -> dict[str, Any]:
    ours, theirs = answers[one["entry"]], answers[other["entry"]]
    test = mcnemar(ours["correct"], theirs["correct"])
    difference = paired_difference(
        ours["correct"], theirs["correct"], ours["cluster"].to_numpy(dtype=str)
    )
    shared = {name: one[name] for name in ("model", "split", "budget", "entry", "b_persist")}
    return shared | {
        "subset": one["category"].removesuffix("_overall"),
        "other": other["entry"],
        "other_b_persist": other["b_persist"],
        "n": len(ours),
        "only_entry": test.b,
        "only_other": test.c,
        "diff_pp": 100 * difference.estimate,
        "diff_low": 100 * difference.low,
        "diff_high": 100 * difference.high,
        "clusters": difference.clusters,
        "mcnemar_p": test.p,
        "smoke": one["smoke"],
    }


def pair_blocks(pairs: pd.DataFrame, accuracy: pd.DataFrame) -> list[Block]:
    """A square of differences for each target and subset: a row's method less a column's."""
    names = entry_names(accuracy)
    blocks = []
    for (subset, budget), group in pairs.groupby(["subset", "budget"], sort=False):
        cells = {(one, other): cell for one, other, cell in _cells(group)}
        entries = list(dict.fromkeys(one for one, _ in cells))
        overall = accuracy[accuracy["category"] == f"{subset}_overall"].set_index("entry")
        columns = (tuple(text for text in names[e] if text != _target(budget)) for e in entries)
        header = (("row less column", "pp"), ("B_persist",), *columns)
        lines = []
        for entry in entries:
            b_persist, flag = overall.loc[entry, "b_persist"], str(overall.loc[entry, "flag"])
            reached = (rounded(float(b_persist), 3), *((flag,) if flag else ()))
            shown = (cells.get((entry, other), ("",)) for other in entries)
            lines.append(Line((names[entry], reached, *shown)))
        title = f"{SUBSET_NAMES[str(subset)]}, {_target(budget)}, n = {group['n'].iloc[0]:,}"
        blocks.append(Block(title, header, tuple(lines)))
    return blocks


def _target(budget: float) -> str:
    """As `entry_names` has it."""
    return f"target {budget:.2f}"


def _cells(group: pd.DataFrame) -> Iterator[tuple[str, str, Cell]]:
    """Each pair as either of the two sees it; all that begin with an entry in the table's order."""
    pairs = group.to_dict("records")
    for pair in pairs:
        yield pair["entry"], pair["other"], _cell(pair, 1)
    for pair in pairs:
        yield pair["other"], pair["entry"], _cell(pair, -1)


def _cell(pair: Any, sign: int) -> Cell:
    alone = (pair["only_entry"], pair["only_other"])[::sign]
    counts = f"{alone[0]} : {alone[1]}"
    p = "p < 0.001" if pair["holm_p"] < 0.001 else f"p {rounded(pair['holm_p'], 3)}"
    low, high = (sign * pair[end] for end in ("diff_low", "diff_high")[::sign])
    interval = f"{signed(low, 1)} to {signed(high, 1)}"
    if isnan(low):
        interval = "one cluster: no interval"
    return signed(sign * pair["diff_pp"], 2), interval, f"{counts}, {p}"


def pair_notes(pairs: pd.DataFrame) -> list[str]:
    """What a reader must know to read the squares, one note a paragraph."""
    if pairs.empty:
        return ["No two methods of this run share a target, so there is nothing to compare."]
    one = pairs.iloc[0]
    notes = [
        f"Model {one['model']}, split {one['split']}.",
        "A cell: the accuracy of the row's method less that of the column's on the same rows, in "
        f"percentage points; the 95 % interval of the paired bootstrap, {RESAMPLES:,} resamples of "
        f"clusters (rows with the same tool set), seed {SEED}; rows that only the row's : only the "
        "column's method got right; p of the exact McNemar test, two-sided, adjusted by Holm over "
        "the comparisons of its square.",
        "B_persist: what was reached; methods off their budget are no comparison at equal bytes. "
        "Methods whose bytes cannot be set are in no square.",
    ]
    if (pairs["n"] < SMALL_CELL).any():
        notes.append(f"Squares of fewer than {SMALL_CELL} rows cannot rank methods.")
    return notes
