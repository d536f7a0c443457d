"""Tables 4 and 5 of the paper from a run's policies.

Percentages and points stay unrounded here. What was not measured is missing (NaN, <NA>).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from pask.bfcl.data import SUBSETS
from pask.config import Entry
from pask.policy.actions import short
from pask.policy.floors import Thresholds, floors
from pask.policy.policy import Policy, Scanned, SidePolicy
from pask.report.policy_frames import (
    FULL,
    NO_FLOORS,
    NO_RANKING,
    PackedSide,
    cheapest,
    packed_sides,
    percent_pair,
)
from pask.report.statistics import paired_difference, wilson
from pask.report.tables import REFERENCE

DECODE_ONLY = "pask_decode"  # the method that follows a policy's decode side, the prompt whole
TEST = "test"

ABLATION = (
    "variant", "families", "levels", "alpha_pct", "decode_b_pct", "dev_k", "dev_n", "dev_pct",
    "dev_low", "dev_high", "entry", "subset", "test_b_decode_pct", "test_k", "test_n", "test_pct",
    "test_low", "test_high", "diff_pp", "diff_low", "diff_high", "paper_decode_b_pct",
    "paper_test_pct", "paper_diff_pp",
)  # fmt: skip
THRESHOLDS = (
    "tau_low_pct", "tau_high_pct", "floors", "candidates", "admissible", "steps", "decode_b_pct",
    "dev_k", "dev_n", "dev_pct", "dev_low", "dev_high", "selected", "paper_decode_b_pct",
    "paper_dev_pct",
)  # fmt: skip
_COUNTS = {
    "dev_k", "dev_n", "test_k", "test_n", "candidates", "distinct", "admissible", "steps",
    "dev_rows", "gate_items", "failures", "reference_failures", "cal_rows", "intervals",
    "v_zero", "harmful", "helpful", "selected",
}  # fmt: skip


def of_test(long: pd.DataFrame | None) -> pd.DataFrame | None:
    """The long table where it is of the test split, whose rows no policy was selected on."""
    if long is None or long.empty or not str(long["split"].iloc[0]).endswith(f"/{TEST}"):
        return None
    return long


def ablation_table(
    policies: Mapping[str, Policy],
    paper: pd.DataFrame,
    long: pd.DataFrame | None = None,
    entries: Sequence[Entry] = (),
) -> pd.DataFrame:
    """Table 4: Full KV, then every different decode side, then what of the paper's has no policy.

    `decode_b_pct` is C_KV of the selected candidate on the development rows, of which `dev_k` are
    right. One row for each `subset` and entry of the method `pask_decode` with such a policy, with
    its accuracy and difference to Full KV where `long` holds test rows; one row with neither where
    there is none. `paper` is `read_table(4)`, of non-live rows.
    """
    sides = packed_sides(policies, "decode")
    test = of_test(long)
    full = next((entry.name for entry in entries if entry.method == REFERENCE), "")
    reference = next((one.chosen for one in sides if one.chosen is not None), None)
    records = []
    for found in [_tested(test, full, full)]:
        base = {"variant": "Full KV", "decode_b_pct": 100.0}
        if reference is not None:
            base |= _accuracy("dev", reference.rows - reference.reference_failures, reference.rows)
        records += [base | row for row in found]
    for one in sides:
        base = _selected(one)
        for name in decode_entries(one, entries) or [""]:
            records += [base | {"entry": name} | row for row in _tested(test, name, full)]
    present = {record["variant"] for record in records}
    records += [{"variant": v} for v in (FULL, NO_RANKING, NO_FLOORS) if v not in present]
    printed = {row["variant"]: row for row in paper.to_dict("records")}
    for record in records:
        quoted = printed.get(record["variant"])
        # The paper's rows are non-live ones, and it has no longer ladder.
        if quoted is not None and record.get("subset") != "live":
            record |= {
                "paper_decode_b_pct": float(quoted["decode_budget_pct"]),
                "paper_test_pct": float(quoted["test_acc_pct"]),
                "paper_diff_pp": _number(quoted["delta_acc_pp"]),
            }
    return table_frame(records, ABLATION)


def thresholds_table(side: SidePolicy, paper: pd.DataFrame) -> pd.DataFrame:
    """Table 5: for each pair of thresholds its first admissible candidate, by rising decode B.

    `floors` counts the buckets at each level, e.g. "R 30, L4 5, H 1". Pairs that only `paper`,
    which is `read_table(5)`, has come last and hold nothing else.
    """
    printed = {
        (float(row["tau_low_pct"]), float(row["tau_high_pct"])): row
        for row in paper.to_dict("records")
    }
    records: list[dict[str, Any]] = []
    for tau in dict.fromkeys(seen.tau for seen in side.candidates if seen.tau is not None):
        own = [seen for seen in side.candidates if seen.tau == tau]
        low, high = percent_pair(tau)
        record = {
            "tau_low_pct": low,
            "tau_high_pct": high,
            "floors": _floor_counts(side, tau),
            "candidates": len(own),
            "admissible": sum(seen.within(side.alpha) for seen in own),
            "selected": 0,
        }
        first = cheapest(own, side.alpha)
        if first is not None:
            record |= _of_candidate(first)
            record["selected"] = int((first.tau, first.steps) == (side.tau, side.steps))
        records.append(record | _quoted_pair(printed.pop((low, high), None)))
    records += [
        {"tau_low_pct": low, "tau_high_pct": high} | _quoted_pair(row)
        for (low, high), row in printed.items()
    ]
    return table_frame(records, THRESHOLDS)


def decode_entries(one: PackedSide, entries: Iterable[Entry]) -> list[str]:
    """The entries of `pask_decode` that follow this side."""
    return [e.name for e in entries if e.method == DECODE_ONLY and e.family in one.families]


def _selected(one: PackedSide) -> dict[str, Any]:
    record: dict[str, Any] = {
        "variant": one.role,
        "families": ", ".join(one.families),
        "levels": str(one.side.evidence.ladder),
        "alpha_pct": 100 * one.side.alpha,
    }
    return record | (_of_candidate(one.chosen) if one.chosen is not None else {})


def _of_candidate(seen: Scanned) -> dict[str, Any]:
    right = _accuracy("dev", seen.rows - seen.failures, seen.rows)
    return {"decode_b_pct": 100 * seen.cost, "steps": seen.steps} | right


def _accuracy(prefix: str, k: int, n: int) -> dict[str, Any]:
    low, high = wilson(k, n)
    return {
        f"{prefix}_k": k,
        f"{prefix}_n": n,
        f"{prefix}_pct": 100 * k / n,
        f"{prefix}_low": 100 * low,
        f"{prefix}_high": 100 * high,
    }


def _tested(test: pd.DataFrame | None, entry: str, full: str) -> list[dict[str, Any]]:
    """An entry's accuracy on test rows, a record a subset; one empty record where it has none."""
    records = []
    for subset, members in SUBSETS.items():
        rows = rows_of(test, entry, members)
        if rows is None:
            continue
        decode = rows["full_bytes"].sum() - rows["full_prompt_bytes"].sum()
        record: dict[str, Any] = {"entry": entry, "subset": subset}
        record |= _accuracy("test", int(rows["correct"].sum()), len(rows))
        record["test_b_decode_pct"] = float(100 * rows["resident_decode_bytes"].sum() / decode)
        reference = rows_of(test, full, members)
        if reference is not None and entry != full:
            difference = test_difference(rows, reference)
            record |= dict(zip(("diff_pp", "diff_low", "diff_high"), difference, strict=True))
        records.append(record)
    return records or [{}]


def rows_of(test: pd.DataFrame | None, entry: str, members: Sequence[str]) -> pd.DataFrame | None:
    if test is None or not entry:
        return None
    rows = test[(test["entry"] == entry) & test["category"].isin(members)].sort_values("id")
    return None if rows.empty else rows


def test_difference(rows: pd.DataFrame, full: pd.DataFrame) -> tuple[float, float, float]:
    found = paired_difference(
        rows["correct"].to_numpy(), full["correct"].to_numpy(), full["cluster"].to_numpy(dtype=str)
    )
    return 100 * found.estimate, 100 * found.low, 100 * found.high


def _floor_counts(side: SidePolicy, tau: Thresholds) -> str:
    levels = list(floors(side.evidence, tau).values())
    counts = {level: levels.count(level) for level in side.evidence.ladder.actions}
    return ", ".join(f"{short(level)} {count}" for level, count in counts.items())


def _quoted_pair(row: Mapping[Any, Any] | None) -> dict[str, Any]:
    if row is None:
        return {}
    return {
        "paper_decode_b_pct": float(row["decode_budget_pct"]),
        "paper_dev_pct": float(row["dev_acc_pct"]),
    }


def _number(text: str) -> float | None:
    return float(text) if text else None


def table_frame(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    frame = pd.DataFrame(records, columns=list(columns))
    for name in columns:
        if name in _COUNTS:
            frame[name] = frame[name].astype("Int64")
        elif name.endswith(("_pct", "_pp", "_low", "_high")):
            frame[name] = frame[name].astype(float)
        else:
            frame[name] = frame[name].astype(object).where(frame[name].notna(), "")
    return frame
