"""From the long table to the accuracy and error tables, as data frames.

Percentages and shares stay unrounded here; `pask.report.render` rounds them last. Every frame says
for itself what it is made of: model, split, n, and in `smoke` why it is no evidence, if it is not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isnan, nan
from typing import Any

import pandas as pd

from pask.bfcl.data import SUBSETS
from pask.config import Entry
from pask.errors import PaskError
from pask.methods.contract import UNREACHABLE
from pask.report import paper as published
from pask.report.long import check_long, entries_of, labels_of
from pask.report.statistics import holm, mcnemar, paired_difference, wilson

TOLERANCE = 0.02
"""How far apart, relatively, the reached bytes of two entries of one target may be without a flag;
so half of it from the target."""
REFERENCE = "full"  # the method that all others are paired with

COLUMNS = (
    "model", "split", "method", "label", "budget", "nominal", "entry", "category", "k", "n",
    "split_n", "accuracy_pct", "ci_low", "ci_high", "b_development", "b_persist", "b_avg",
    "b_read", "b_prompt", "b_decode",
    "unreachable", "clamped", "flips", "lost", "gained", "diff_vs_full_pp", "diff_low",
    "diff_high", "clusters", "mcnemar_p", "holm_p", "flag", "paper_model", "paper_k", "paper_n",
    "paper_accuracy_pct", "verdict", "smoke",
)  # fmt: skip
COUNTS = ("k", "n", "split_n", "unreachable", "clamped", "flips", "lost", "gained", "clusters",
          "paper_k", "paper_n")  # fmt: skip


def accuracy_table(
    long: pd.DataFrame,
    paper: pd.DataFrame,
    sizes: Mapping[str, int],
    *,
    entries: Sequence[Entry] | None = None,
    labels: Mapping[str, str] | None = None,
    split_sizes: Mapping[str, int] = published.TEST_SIZES,
    paper_model: str = "Qwen3-4B",
    smoke: str = "",
    not_reachable: Collection[str] = (),
) -> pd.DataFrame:
    """One row an entry and category, then one for its subset's overall (micro: counts are summed).

    `sizes` is how many rows of each category were to be run, `split_sizes` how many the whole split
    has; where they differ the table calls itself a sample. `entries` lists what the config asks for
    (default: what the long table has); one without any row becomes "not run", or "not reachable"
    where its budget is, and takes its label from `labels` (method name -> label). `smoke` is a
    further reason why the figures are no evidence, e.g. "tiny random model".

    Shares are ratios of sums over the row's items: `b_persist` resident bytes at the end over Full
    KV's, `b_prompt` and `b_decode` the same within each stage, `b_avg` byte-steps over Full KV's
    byte-steps, `b_read` the bytes that attention read at these steps over the same. `b_development`
    is the entry's `b_persist` on the development rows along Full KV's answers, which its knob was
    set by; missing where nothing was searched. `nominal` is the knob's value, missing where the
    method has none: such an entry holds its own bytes and has no target. `unreachable` counts rows
    held above what the knob asks, `clamped` those with another note. `lost` and `gained` count
    items that Full KV alone, or this entry alone, got right. Overalls are compared with Full KV:
    difference in pp with its paired cluster-bootstrap interval, exact McNemar p, and Holm's p over
    all such comparisons of this table.

    Raises HarnessFault where the long table is incomplete or inconsistent, PaskError where
    `paper_model` is not one of the paper's.
    """
    if paper_model not in published.CHECKPOINTS:
        known = ", ".join(published.CHECKPOINTS)
        raise PaskError(f"the paper has no model {paper_model!r}", todo=f"known: {known}")
    entries = entries_of(long) if entries is None else entries
    labels = {**(labels or {}), **labels_of(long)}
    check_long(long, sizes, entries)
    run, whole = sum(sizes.values()), sum(split_sizes.values())
    split = str(long["split"].iloc[0])
    part = split.rpartition("/")[2]
    sample = f"sample of {run:,} of {whole:,} {part} rows" if run != whole else ""
    common = {
        "model": str(long["model"].iloc[0]),
        "split": split,
        "paper_model": paper_model,
        "smoke": ", ".join(part for part in (smoke, sample) if part),
    }
    full = next((e.name for e in entries if e.method == REFERENCE), None)
    full_rows = long[long["entry"] == full].sort_values("id")
    records = []
    for entry in entries:
        entry_rows = long[long["entry"] == entry.name].sort_values("id")
        for category, members in _groups(sizes):
            record = common | {
                "method": entry.method,
                "label": labels.get(entry.method, entry.method),
                "budget": entry.budget,
                "entry": entry.name,
                "category": category,
                "n": sum(sizes[c] for c in members),
                "split_n": sum(split_sizes[c] for c in members),
            }
            if entry_rows.empty:
                record["flag"] = "not reachable" if entry.name in not_reachable else "not run"
            else:
                rows = entry_rows[entry_rows["category"].isin(members)]
                record |= _measured(rows, entry.budget)
                pair = full_rows[full_rows["category"].isin(members)]
                if entry.method != REFERENCE and not pair.empty:
                    record |= _against(rows, pair, overall=category not in members)
            record |= _published(record, paper)
            records.append(record)
    frame = pd.DataFrame(records, columns=list(COLUMNS))
    tested = frame["mcnemar_p"].notna()
    frame.loc[tested, "holm_p"] = holm(frame.loc[tested, "mcnemar_p"].tolist())
    frame["flag"] = frame["flag"].fillna("")
    return frame.astype(
        dict.fromkeys(COUNTS, "Int64")
        | {name: float for name in COLUMNS if name.endswith(("_p", "_pp", "_low", "_high"))}
    )


def error_table(
    long: pd.DataFrame,
    *,
    entries: Sequence[Entry] | None = None,
    labels: Mapping[str, str] | None = None,
    smoke: str = "",
) -> pd.DataFrame:
    """How each entry's answers came out: model, split, method, label, budget, entry, outcome,
    count, n, smoke.

    `outcome` is "correct" or an error type; every entry has every outcome of the table, errors by
    falling total, and an entry's counts add up to its n. Entries without rows have no counts.
    """
    entries = entries_of(long) if entries is None else entries
    labels = {**(labels or {}), **labels_of(long)}
    outcome = long["error_type"].where(long["correct"] == 0, "correct")
    totals = outcome[outcome != "correct"].value_counts()
    outcomes = ["correct", *sorted(totals.index, key=lambda name: (-totals[name], name))]
    records = []
    for entry in entries:
        counts = outcome[long["entry"] == entry.name].value_counts()
        n = int(counts.sum())
        records += [
            {
                "model": str(long["model"].iloc[0]),
                "split": str(long["split"].iloc[0]),
                "method": entry.method,
                "label": labels.get(entry.method, entry.method),
                "budget": entry.budget,
                "entry": entry.name,
                "outcome": name,
                "count": int(counts.get(name, 0)) if n else None,
                "n": n or None,
                "smoke": smoke,
            }
            for name in outcomes
        ]
    return pd.DataFrame(records).astype({"count": "Int64", "n": "Int64"})


def _groups(sizes: Mapping[str, int]) -> list[tuple[str, tuple[str, ...]]]:
    """The table's categories in order, each with the BFCL categories that it sums over."""
    groups: list[tuple[str, tuple[str, ...]]] = []
    for subset, members in SUBSETS.items():
        present = tuple(c for c in members if sizes.get(c, 0))
        groups += [(c, (c,)) for c in present]
        if present:
            groups.append((f"{subset}_overall", present))
    return groups


def _measured(rows: pd.DataFrame, budget: float) -> dict[str, Any]:
    k, n = int(rows["correct"].sum()), len(rows)
    low, high = wilson(k, n)
    total = rows.sum(numeric_only=True)
    nominal = float(rows["nominal"].iloc[0])
    notes = rows["notes"].fillna("").str.split()
    decode_full = total["full_bytes"] - total["full_prompt_bytes"]
    resident = total["resident_prompt_bytes"] + total["resident_decode_bytes"]
    b_persist = _share(resident, total["full_bytes"])
    off = not isnan(nominal) and abs(b_persist / budget - 1) > TOLERANCE / 2
    return {
        "k": k,
        "accuracy_pct": 100 * k / n,
        "ci_low": 100 * low,
        "ci_high": 100 * high,
        "b_development": float(rows["b_development"].iloc[0]),
        "b_persist": b_persist,
        "b_avg": _share(total["resident_byte_steps"], total["full_byte_steps"]),
        "b_read": _share(total["read_byte_steps"], total["full_byte_steps"]),
        "b_prompt": _share(total["resident_prompt_bytes"], total["full_prompt_bytes"]),
        "b_decode": _share(total["resident_decode_bytes"], decode_full),
        "nominal": nominal,
        "unreachable": sum(UNREACHABLE in said for said in notes),
        "clamped": sum(any(note != UNREACHABLE for note in said) for said in notes),
        "flag": f"off budget: {b_persist:.3g}" if off else "",
    }


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else nan


def _against(rows: pd.DataFrame, full: pd.DataFrame, *, overall: bool) -> dict[str, Any]:
    """How an entry's rows differ from Full KV's on the same items; tests only for overalls."""
    ours, theirs = rows["correct"].to_numpy(), full["correct"].to_numpy()
    test = mcnemar(theirs, ours)
    record: dict[str, Any] = {"flips": test.b + test.c, "lost": test.b, "gained": test.c}
    if overall:
        clusters = full["cluster"].to_numpy(dtype=str)
        difference = paired_difference(ours, theirs, clusters)
        record |= {
            "diff_vs_full_pp": 100 * difference.estimate,
            "diff_low": 100 * difference.low,
            "diff_high": 100 * difference.high,
            "clusters": difference.clusters,
            "mcnemar_p": test.p,
        }
    return record


def _published(record: Mapping[str, Any], paper: pd.DataFrame) -> dict[str, Any]:
    """The paper's figure for this row, where it has one, and a verdict where one can be given."""
    if record["method"] != REFERENCE and record["budget"] != published.BUDGET:
        return {"verdict": ""}
    found = paper[
        (paper["model"] == record["paper_model"])
        & (paper["method"] == record["method"])
        & (paper["category"] == record["category"])
    ]
    if found.empty:
        return {"verdict": ""}
    row = found.iloc[0]
    verdict = ""
    comparable = published.is_papers_model(record["model"], record["paper_model"])
    if comparable and not record["smoke"] and not record["flag"]:
        inside = record["ci_low"] <= row["accuracy_pct"] <= record["ci_high"]
        verdict = "inside our interval" if inside else "outside our interval"
    return {
        "paper_k": int(row["k"]),
        "paper_n": int(row["n"]),
        "paper_accuracy_pct": float(row["accuracy_pct"]),
        "verdict": verdict,
    }
