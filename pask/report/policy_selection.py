"""What a selection rests on: how much was tried, on how many rows, and whether it held on others.

Percentages and points stay unrounded here. What was not measured is missing (NaN, <NA>).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from pask.bfcl.data import SUBSETS
from pask.config import Entry
from pask.policy.policy import Policy, gate_items
from pask.report.policy_frames import (
    PackedSide,
    distinct_candidates,
    packed_sides,
    percent_pair,
)
from pask.report.policy_tables import (
    decode_entries,
    of_test,
    rows_of,
    table_frame,
    test_difference,
)
from pask.report.tables import REFERENCE

SELECTION = (
    "variant", "families", "side", "levels", "tau_low_pct", "tau_high_pct", "alpha_pct",
    "candidates", "distinct", "admissible", "dev_rows", "gate_items", "failures",
    "reference_failures", "increase_pp", "increase_low", "increase_high", "entry", "test_n",
    "test_increase_pp", "test_increase_low", "test_increase_high", "shrinkage_pp", "cal_rows",
    "intervals", "v_zero", "harmful", "helpful",
)  # fmt: skip


def selection_table(
    policies: Mapping[str, Policy],
    long: pd.DataFrame | None = None,
    entries: Sequence[Entry] = (),
) -> pd.DataFrame:
    """What each different side's selection rests on: how much was tried, on how many rows.

    `gate_items` is how many more rows than Full KV a candidate may fail. `shrinkage_pp` is the
    increase of failures on test rows less that on development rows, of entries that follow this
    side alone. `intervals`: V's, one a bucket and level; of them `v_zero` with V exactly 0,
    `harmful` wholly above 0 and `helpful` wholly below.
    """
    test = of_test(long)
    full = next((entry.name for entry in entries if entry.method == REFERENCE), "")
    records: list[dict[str, Any]] = []
    for name in ("decode", "prompt"):
        for one in packed_sides(policies, name):
            base = _selection(one)
            followed = decode_entries(one, entries) if name == "decode" else []
            measured = [(entry, _increase(test, entry, full)) for entry in followed]
            for entry, found in measured or [("", {})]:
                record = base | ({"entry": entry} | found if found else {})
                if found and "increase_pp" in base:
                    record["shrinkage_pp"] = found["test_increase_pp"] - base["increase_pp"]
                records.append(record)
    return table_frame(records, SELECTION)


def _selection(one: PackedSide) -> dict[str, Any]:
    side, seen = one.side, one.chosen
    tau_low, tau_high = percent_pair(side.tau)
    failures = [found for bucket in side.evidence.buckets for found in bucket.failures.values()]
    intervals = [found.interval() for found in failures]
    record: dict[str, Any] = {
        "variant": one.role,
        "families": ", ".join(one.families),
        "side": side.evidence.side,
        "levels": str(side.evidence.ladder),
        "tau_low_pct": tau_low,
        "tau_high_pct": tau_high,
        "alpha_pct": 100 * side.alpha,
        "candidates": len(side.candidates),
        "distinct": distinct_candidates(side),
        "admissible": sum(found.within(side.alpha) for found in side.candidates),
        "cal_rows": side.evidence.rows,
        "intervals": len(intervals),
        "v_zero": sum(found.lost == found.gained for found in failures),
        "harmful": sum(low > 0 for low, _ in intervals),
        "helpful": sum(high < 0 for _, high in intervals),
    }
    if seen is not None:
        low, high = seen.interval()
        record |= {
            "dev_rows": seen.rows,
            "gate_items": gate_items(side.alpha, seen.rows),
            "failures": seen.failures,
            "reference_failures": seen.reference_failures,
            "increase_pp": 100 * seen.increase,
            "increase_low": 100 * low,
            "increase_high": 100 * high,
        }
    return record


def _increase(test: pd.DataFrame | None, entry: str, full: str) -> dict[str, Any]:
    """Failures of all test rows above Full KV's; empty where one of the two has none."""
    everything = [category for members in SUBSETS.values() for category in members]
    rows, reference = rows_of(test, entry, everything), rows_of(test, full, everything)
    if rows is None or reference is None:
        return {}
    point, low, high = test_difference(rows, reference)
    return {
        "test_n": len(rows),
        "test_increase_pp": -point,
        "test_increase_low": -high,
        "test_increase_high": -low,
    }
