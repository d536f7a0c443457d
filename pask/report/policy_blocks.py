"""The policy page's blocks: cells from `policy_tables`, rounded, each figure with its n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import pandas as pd

from pask.report.blocks import NOTHING, SUBSET_NAMES, Block, Cell, Line, signed
from pask.report.policy_correlation import RankCorrelation
from pask.report.statistics import rounded

NOT_RUN: Cell = ("not run",)


def selection_block(frame: pd.DataFrame) -> Block:
    """What each selection rests on, from a `selection_table`."""
    header: tuple[Cell, ...] = (
        ("policy",), ("side",), ("thresholds", "low / high, %"), ("candidates", "distinct"),
        ("tolerance", "in rows"), ("development", "wrong, of rows"), ("increase", "pp"),
        ("test", "increase, pp"), ("test less development", "pp"), ("V above 0", "of intervals"),
        ("V below 0",),
    )  # fmt: skip
    lines = []
    for row in frame.to_dict("records"):
        tried = NOT_RUN if pd.isna(row["dev_rows"]) else None
        wrong = f"{row['failures']} / {row['dev_rows']}"
        lines.append(
            Line(
                (
                    _headed(row),
                    (row["side"],),
                    _pair(row),
                    (str(row["candidates"]), f"{row['distinct']} distinct"),
                    (f"{rounded(row['alpha_pct'], 1)} %",)
                    + (() if tried else (f"{row['gate_items']} of {row['dev_rows']}",)),
                    tried or (wrong, f"Full KV {row['reference_failures']} / {row['dev_rows']}"),
                    tried or _signed_interval(row, "increase_pp", "increase"),
                    _test_increase(row),
                    _signed_or_not_run(row["shrinkage_pp"]),
                    (str(row["harmful"]), f"of {row['intervals']}, {row['cal_rows']} rows"),
                    (str(row["helpful"]),),
                )
            )
        )
    return Block("What was selected, and on what", header, tuple(lines))


def ablation_block(frame: pd.DataFrame) -> Block:
    """Table 4, the paper's rows below ours; from an `ablation_table`."""
    subsets = [s for s in SUBSET_NAMES if (frame["subset"] == s).any()] or ["nonlive"]
    header: list[Cell] = [("decode policy",), ("decode B", "%"), ("development", "% right")]
    for subset in subsets:
        header += [(f"test, {SUBSET_NAMES[subset].lower()}", "% right"), ("Δ vs Full KV", "pp")]
    lines = []
    shown = frame.fillna({"entry": ""}).groupby(["variant", "families", "entry"], sort=False)
    quoted: set[str] = set()
    order = list(dict.fromkeys(frame["variant"]))
    groups = [(key, group) for key, group in shown]
    for variant in order:
        for (name, _, _), group in groups:
            if name == variant:
                lines.append(_ablation_line(group, subsets))
        row = frame[frame["variant"] == variant].iloc[0]
        if variant not in quoted and not pd.isna(row["paper_test_pct"]):
            quoted.add(variant)
            cells: list[Cell] = [("paper, non-live",)]
            cells += [(rounded(row["paper_decode_b_pct"], 2),), NOTHING]
            for subset in subsets:
                own = subset == "nonlive"
                cells.append((rounded(row["paper_test_pct"], 2),) if own else NOTHING)
                gap = row["paper_diff_pp"]
                cells.append((signed(gap, 2),) if own and not isnan(gap) else NOTHING)
            lines.append(Line(tuple(cells), muted=True))
    return Block("Ablation of the decode policy (the paper's Table 4)", tuple(header), tuple(lines))


def _ablation_line(group: pd.DataFrame, subsets: Sequence[str]) -> Line:
    first = group.iloc[0].to_dict()
    b = first["decode_b_pct"]
    budget: Cell = NOT_RUN if isnan(b) else (rounded(b, 2),)
    dev = NOT_RUN if pd.isna(first["dev_k"]) else _accuracy(first, "dev")
    cells = [_headed(first), budget, dev]
    by_subset = {row["subset"]: row for row in group.to_dict("records")}
    for subset in subsets:
        row = by_subset.get(subset)
        if row is None:
            cells += [NOT_RUN, NOTHING if first["variant"] == "Full KV" else NOT_RUN]
            continue
        reached = f"reached decode B {rounded(row['test_b_decode_pct'], 2)} %"
        cells.append((*_accuracy(row, "test"), reached))
        cells.append(NOTHING if isnan(row["diff_pp"]) else _signed_interval(row, "diff_pp", "diff"))
    return Line(tuple(cells))


def thresholds_block(frame: pd.DataFrame, alpha_pct: float) -> Block:
    """Table 5, the paper's figures in a line below ours; from a `thresholds_table`."""
    header: tuple[Cell, ...] = (
        ("thresholds", "low / high, %"), ("decode B", "%"), ("development", "% right"),
        ("floors", "buckets at each level"), ("candidates", "within the tolerance"),
        ("upgrades",),
    )  # fmt: skip
    lines = []
    for row in frame.to_dict("records"):
        ran = not pd.isna(row["candidates"])
        found = not pd.isna(row["dev_k"])
        missing: Cell = ("none within",) if ran else NOT_RUN
        name = _pair(row) + (("selected",) if ran and row["selected"] else ())
        lines.append(
            Line(
                (
                    name,
                    (rounded(row["decode_b_pct"], 2),) if found else missing,
                    _accuracy(row, "dev") if found else missing,
                    (row["floors"],) if ran else NOT_RUN,
                    (str(row["candidates"]), f"{row['admissible']} within") if ran else NOT_RUN,
                    (str(row["steps"]),) if found else missing,
                )
            )
        )
        if not isnan(row["paper_dev_pct"]):
            quoted = (rounded(row["paper_decode_b_pct"], 2),), (rounded(row["paper_dev_pct"], 1),)
            lines.append(Line((("paper",), *quoted, *[NOTHING] * 3), muted=True))
    title = (
        "First admissible candidate of each pair of thresholds (the paper's Table 5), "
        f"tolerance {rounded(alpha_pct, 1)} points"
    )
    return Block(title, header, tuple(lines))


def correlation_block(found: Mapping[tuple[str, str], RankCorrelation], zero: pd.Series) -> Block:
    """Figure 1 in numbers. `zero`: how many V are exactly 0, by the same side and level."""
    header: tuple[Cell, ...] = (
        ("side",), ("level",), ("Spearman's rho", "D against V"), ("p", "permutation"),
        ("buckets", "with a layer group"), ("V exactly 0",),
    )  # fmt: skip
    lines = []
    for (side, level), one in found.items():
        rho: Cell = ("no variation",)
        p: Cell = NOTHING
        if not isnan(one.rho):
            rho = (signed(one.rho, 2),)
        if not isnan(one.p):
            rho += (f"{signed(one.low, 2)} to {signed(one.high, 2)}",)
            p = ("< 0.001",) if one.p < 0.001 else (rounded(one.p, 3),)
        names = f"{one.names} names"
        counted = (str(int(zero[side, level])), f"of {one.n}")
        lines.append(Line(((side,), (level,), rho, p, (str(one.n), names), counted)))
    return Block("Distortion against failures (the paper's Figure 1)", header, tuple(lines))


def _headed(row: Mapping[Any, Any]) -> Cell:
    more: Cell = (row["families"],) if row["families"] else ()
    if row["levels"] not in ("", "R,L4,H"):
        more += (f"levels {row['levels']}",)
    if row["entry"] and row["entry"] not in more and row["variant"] != "Full KV":
        more += (row["entry"],)
    return row["variant"], *more


def _pair(row: Mapping[Any, Any]) -> Cell:
    if isnan(row["tau_low_pct"]):
        return ("none",)
    return (f"{row['tau_low_pct']:g} / {row['tau_high_pct']:g}",)


def _accuracy(row: Mapping[Any, Any], prefix: str) -> Cell:
    interval = f"{rounded(row[f'{prefix}_low'], 1)}–{rounded(row[f'{prefix}_high'], 1)}"
    counts = f"{row[f'{prefix}_k']}/{row[f'{prefix}_n']}"
    return rounded(row[f"{prefix}_pct"], 2), counts, interval


def _signed_interval(row: Mapping[Any, Any], point: str, prefix: str) -> Cell:
    shown = signed(row[point], 2)
    low, high = row[f"{prefix}_low"], row[f"{prefix}_high"]
    if isnan(low):
        return (shown, "one cluster: no interval")
    return shown, f"{signed(low, 1)} to {signed(high, 1)}"


def _test_increase(row: Mapping[Any, Any]) -> Cell:
    if isnan(row["test_increase_pp"]):
        return NOT_RUN
    return *_signed_interval(row, "test_increase_pp", "test_increase"), f"n = {row['test_n']:,}"


def _signed_or_not_run(value: float) -> Cell:
    return NOT_RUN if isnan(value) else (signed(value, 2),)
