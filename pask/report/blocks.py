"""What a reader sees of a table: titled blocks of cells and the notes under them, as plain text.

`pask.report.render` prints the same blocks as Markdown, LaTeX and HTML, so the three cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pask.bfcl.data import SUBSETS
from pask.report.paper import BUDGET, CHECKPOINTS, is_papers_model
from pask.report.statistics import RESAMPLES, SEED, rounded
from pask.report.tables import REFERENCE, TOLERANCE

Cell = tuple[str, ...]  # its lines; the first one carries the figure
SUBSET_NAMES = {"nonlive": "Non-live", "live": "Live"}
NOTHING: Cell = ("–",)
SMALL_CELL = 30  # below so many rows a cell can rank nothing: 6 one-way flips are p = .031


@dataclass(frozen=True)
class Line:
    """One row of a block; `muted` for what is quoted, not measured."""

    cells: tuple[Cell, ...]
    muted: bool = False


@dataclass(frozen=True)
class Block:
    """A titled rectangle of cells; the first column names the row."""

    title: str
    header: tuple[Cell, ...]
    lines: tuple[Line, ...]

    def __post_init__(self) -> None:
        if any(len(line.cells) != len(self.header) for line in self.lines):
            raise ValueError(f"block {self.title!r} is not rectangular")


def smoke_line(frame: pd.DataFrame) -> str:
    """Why these figures are no evidence, as one sentence; empty if they are."""
    reason = str(frame["smoke"].iloc[0])
    return f"{reason[0].upper()}{reason[1:]}: a smoke figure, not evidence." if reason else ""


def entry_names(frame: pd.DataFrame) -> dict[str, Cell]:
    """Entry -> how its row is headed; the entry's own name is added where labels would collide."""
    seen = frame.drop_duplicates("entry")
    twice = seen.duplicated(["label", "budget"], keep=False)
    names: dict[str, Cell] = {}
    for row, ambiguous in zip(seen.to_dict("records"), twice, strict=True):
        target: Cell = (f"target {row['budget']:.2f}",)
        if "@" not in row["entry"]:  # a method without a knob: see `pask.config`
            target = () if row["method"] == REFERENCE else ("its own bytes",)
        names[row["entry"]] = (row["label"], *target, *((row["entry"],) if ambiguous else ()))
    return names


def accuracy_blocks(frame: pd.DataFrame) -> list[Block]:
    """Accuracy of each subset, then the pairing with Full KV, then the bytes that were reached."""
    names = entry_names(frame)
    subsets = [s for s in SUBSETS if (frame["category"] == f"{s}_overall").any()]
    blocks = [_accuracy(frame, subset, names) for subset in subsets]
    blocks.append(_pairing(frame, subsets, names))
    blocks.append(_bytes(frame, subsets, names))
    return [block for block in blocks if block.lines]


def error_blocks(frame: pd.DataFrame) -> list[Block]:
    """Outcomes as rows, entries as columns."""
    names = entry_names(frame)
    header = [("outcome",), *(names[entry] for entry in names)]
    lines = []
    for outcome, group in frame.groupby("outcome", sort=False):
        count = group.set_index("entry")["count"]
        shown = (("not run",) if pd.isna(count[e]) else (str(count[e]),) for e in names)
        lines.append(Line(((str(outcome),), *shown)))
    return [Block("Answers by outcome", tuple(header), tuple(lines))]


def accuracy_notes(frame: pd.DataFrame) -> list[str]:
    """What a reader must know to read the accuracy table, one note a paragraph."""
    one = frame.iloc[0]
    overalls = frame["category"].str.endswith("_overall")
    run, whole = (int(frame.loc[(frame["entry"] == one["entry"]) & overalls, c].sum())
                  for c in ("n", "split_n"))  # fmt: skip
    rows = f"all {run:,} rows" if run == whole else f"a sample of {run:,} of {whole:,} rows"
    notes = [
        f"Model {one['model']}, split {one['split']}, {rows}.",
        "A cell gives accuracy in percent, right answers / rows, and the 95 % Wilson interval. "
        "Overalls are micro averages: counts are summed, not percentages averaged"
        + (", so categories weigh as in the sample." if run != whole else "."),
        "B_persist: bytes resident at the end of a request over the bytes Full KV would hold then, "
        "a ratio of sums over the rows; everything that a method keeps is counted. Off budget: "
        f"more than {rounded(50 * TOLERANCE, 0)} % (relative) off its target; two entries of one "
        f"target without that flag are within {rounded(100 * TOLERANCE, 0)} % of each other, "
        "others are no comparison at equal bytes. Its own bytes: a method without a knob.",
        "Development: B_persist on the development rows, all subsets together, along Full KV's "
        "answers to them; the knob was set so that this figure meets the target. B_persist differs "
        "where a method's own answers are longer or shorter than Full KV's, or the rows are "
        "others. No figure: nothing was searched.",
        "B_avg: resident bytes summed over the steps of decoding, over Full KV's. B_read: bytes "
        "that attention reads at these steps, over the same; it is traffic, not storage. A method "
        "that finds the tokens worth reading by summaries stores more than it reads (counted: "
        "these tokens, whole slots, and the channels of the summaries that are looked at); all "
        "others read what is resident, pages included, so theirs equals B_avg.",
        "Unreachable: rows that a method holds above what its knob asks, because it cannot go "
        "lower there; clamped: rows on which it shrank a window, loosened floors or the like.",
    ]
    if frame["diff_vs_full_pp"].notna().any():
        tests = int(frame["holm_p"].notna().sum())
        notes.append(
            "Δ: percentage points against Full KV on the same rows; interval: paired bootstrap, "
            f"{RESAMPLES:,} resamples of clusters (rows with the same tool set), seed {SEED}; p: "
            f"exact McNemar test, two-sided; Holm: adjusted over this table's {tests} comparisons."
        )
    if (frame["n"] < SMALL_CELL).any():
        notes.append(f"Cells with fewer than {SMALL_CELL} rows cannot rank methods.")
    notes += _paper_notes(frame)
    for flag in ("not run", "not reachable"):
        missing = frame.loc[frame["flag"] == flag, "entry"].unique()
        if len(missing):
            notes.append(f"{flag.capitalize()}: {', '.join(missing)}.")
    return notes


def _paper_notes(frame: pd.DataFrame) -> list[str]:
    if frame["paper_k"].isna().all():
        return []
    one = frame.iloc[0]
    notes = [
        f"Paper: its Table 1 for {one['paper_model']} at a total KV budget of {BUDGET}; "
        "counts recovered from the printed percentages."
    ]
    theirs = CHECKPOINTS[one["paper_model"]]
    if not is_papers_model(one["model"], one["paper_model"]):
        notes.append(f"No verdict on the paper's figures: they are of {theirs}, ours are not.")
    elif one["smoke"]:
        notes.append("No verdict on the paper's figures: these are no evidence.")
    else:
        notes.append("Verdict: whether the paper's figure lies in our interval, entries on budget.")
    return notes


def _accuracy(frame: pd.DataFrame, subset: str, names: dict[str, Cell]) -> Block:
    overall = f"{subset}_overall"
    present = set(frame["category"])
    columns = [c for c in (*SUBSETS[subset], overall) if c in present]
    first = frame[frame["entry"] == next(iter(names))].set_index("category")
    header: list[Cell] = [("method",), ("B_persist",)]
    header += [(_short(c), f"n = {first.loc[c, 'n']:,}") for c in columns]
    header.append(("Δ vs Full KV", "pp"))
    lines = []
    for entry, name in names.items():
        cells = frame[frame["entry"] == entry].set_index("category")
        total = cells.loc[overall]
        if pd.isna(total["k"]):
            lines.append(Line((name, *[(total["flag"],)] * (len(header) - 1))))
        else:
            off = (total["flag"],) if total["flag"] else ()
            lines.append(
                Line(
                    (
                        name,
                        (rounded(total["b_persist"], 3), *off),
                        *(_measured(cells.loc[c]) for c in columns),
                        _difference(total),
                    )
                )
            )
        if not pd.isna(total["paper_k"]):
            quoted = (f"paper, {total['paper_model']}",)
            budget = ("1",) if total["method"] == REFERENCE else (f"{BUDGET}",)
            shown = (_quoted(cells.loc[c]) for c in columns)
            lines.append(Line((quoted, budget, *shown, NOTHING), muted=True))
    return Block(f"{SUBSET_NAMES[subset]}, accuracy in %", tuple(header), tuple(lines))


def _short(category: str) -> str:
    if category.endswith("_overall"):
        return "overall"
    return category.removeprefix("live_").removesuffix("_python").replace("_", " ")


def _measured(row: pd.Series[Any]) -> Cell:
    interval = f"{rounded(row['ci_low'], 1)}–{rounded(row['ci_high'], 1)}"
    return rounded(row["accuracy_pct"], 2), f"{row['k']}/{row['n']}", interval


def _quoted(row: pd.Series[Any]) -> Cell:
    verdict = (row["verdict"],) if row["verdict"] else ()
    return rounded(row["paper_accuracy_pct"], 2), f"{row['paper_k']}/{row['paper_n']}", *verdict


def signed(value: float, digits: int) -> str:
    """Rounded, with its sign before it; none before 0."""
    text = rounded(value, digits)
    return text.replace("-", "−") if value < 0 else f"+{text}" if float(text) else text


def _difference(row: pd.Series[Any]) -> Cell:
    if pd.isna(row["diff_vs_full_pp"]):
        return NOTHING
    point = signed(row["diff_vs_full_pp"], 2)
    if pd.isna(row["diff_low"]):
        return (point, "one cluster: no interval")
    return point, f"{signed(row['diff_low'], 1)} to {signed(row['diff_high'], 1)}"


def _p(value: float) -> Cell:
    return ("< 0.001",) if value < 0.001 else (rounded(value, 3),)


def _overalls(
    frame: pd.DataFrame, subsets: Sequence[str], names: dict[str, Cell]
) -> Iterable[tuple[Cell, Cell, pd.Series[Any]]]:
    for subset in subsets:
        rows = frame[frame["category"] == f"{subset}_overall"].set_index("entry")
        for entry, name in names.items():
            if not pd.isna(rows.loc[entry, "k"]):
                yield name, (SUBSET_NAMES[subset],), rows.loc[entry]


def _pairing(frame: pd.DataFrame, subsets: Sequence[str], names: dict[str, Cell]) -> Block:
    header = ("method", "rows", "lost", "gained", "p", "Holm", "clusters")
    lines = [
        Line(
            (
                name,
                subset,
                (str(row["lost"]),),
                (str(row["gained"]),),
                _p(row["mcnemar_p"]),
                _p(row["holm_p"]),
                (str(row["clusters"]),),
            )
        )
        for name, subset, row in _overalls(frame, subsets, names)
        if not pd.isna(row["mcnemar_p"])
    ]
    title = "Against Full KV: rows that only Full KV (lost) or only the method (gained) got right"
    return Block(title, tuple((text,) for text in header), tuple(lines))


def _bytes(frame: pd.DataFrame, subsets: Sequence[str], names: dict[str, Cell]) -> Block:
    shares = {
        "b_development": "development",
        "b_persist": "B_persist",
        "b_avg": "B_avg",
        "b_read": "B_read",
        "b_prompt": "prompt",
        "b_decode": "decode",
    }
    header = ("method", "rows", "knob", *shares.values(), "unreachable", "clamped")
    lines = [
        Line(
            (
                name,
                subset,
                *(
                    NOTHING if pd.isna(row[s]) else (rounded(row[s], 4),)
                    for s in ("nominal", *shares)
                ),
                (str(row["unreachable"]),),
                (str(row["clamped"]),),
            )
        )
        for name, subset, row in _overalls(frame, subsets, names)
    ]
    title = "Bytes as shares of Full KV's: resident at the end, over the steps, read, by stage"
    return Block(title, tuple((text,) for text in header), tuple(lines))
