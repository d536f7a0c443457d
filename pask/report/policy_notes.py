"""What a reader must know to read the policy page, one note a paragraph."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from pask.config import RunConfig
from pask.policy.policy import Policy
from pask.report.policy_frames import packed_sides
from pask.report.policy_tables import DECODE_ONLY, decode_entries
from pask.report.statistics import RESAMPLES, SEED, rounded


def smoke(selection: pd.DataFrame, few: int) -> str:
    """Why the page is no evidence, in one sentence; empty from `few` rows of both parts on."""
    parts = (selection["cal_rows"], selection["dev_rows"].dropna())
    if all(len(rows) and rows.min() >= few for rows in parts):
        return ""
    calibration, development = map(_span, parts)
    return (
        f"Sample of {calibration} calibration and {development} development rows: a smoke figure, "
        "not evidence."
    )


def _span(rows: pd.Series[int]) -> str:
    """Policies of one page may rest on different numbers of rows."""
    if rows.empty:
        return "0"
    least, most = int(rows.min()), int(rows.max())
    return str(least) if least == most else f"{least} to {most}"


def policy_notes(
    config: RunConfig,
    policies: Mapping[str, Policy],
    family: str,
    buckets: pd.DataFrame,
    elsewhere: str,
) -> list[str]:
    """`buckets` are of `family`, which the figures are of; `elsewhere` names the long table's split
    where it is not the test split."""
    policy = policies[family]
    files = ", ".join(f"{name} {one.digest[:16]}" for name, one in policies.items())
    rows = policy.decode.evidence.rows
    zero = buckets["lost"] == buckets["gained"]
    untouched = zero & (buckets["lost"] == 0)
    excluded = int(((buckets["v_low"] > 0) | (buckets["v_high"] < 0)).sum())
    notes = [
        f"Model {config.model.name}, split {config.data.split}; layer groups of "
        f"{', '.join(map(str, policy.decode.evidence.groups))} layers, coarsening "
        f"{policy.coarsening}. Policies (digest): {files}. Figures, thresholds and rho are of "
        f"{family}.",
        "V: how much more often answers fail on the calibration rows with this bucket alone at a "
        "lower level, in points; V-bar is its monotone envelope (Equation 5). D: distortion of "
        "attention's output (Equation 4), summed over the layers of a group. Floor: the least "
        "level that V-bar allows; action: the level selected.",
        f"V comes in steps of one row of {rows}, {rounded(100 / rows, 2)} points: {int(zero.sum())}"
        f" of {len(buckets)} V of {family} are exactly 0, {int(untouched.sum())} of them because "
        "no row changed its outcome; a threshold below one step protects whatever lost one row "
        "more than it gained.",
        "V above and below 0: 95 % score intervals for paired data (Tango 1998) that exclude 0; of "
        f"{family} {excluded} of {len(buckets)}. If all V were 0, one in twenty would by "
        "chance at most, and fewer where few rows changed their outcome; nothing is adjusted for "
        "how many there are.",
        f"rho: ties at mean ranks; interval: bootstrap of bucket names, layer groups together; p: "
        f"names permuted; {RESAMPLES:,} draws each, seed {SEED}. V of few rows is coarse, which by "
        "itself draws rho to 0.",
        "Decode B: C_KV of Equation 1 on the development rows, every answer token at its final "
        "level over all at 16 bits, in per cent; the prompt is whole. Candidates are judged by "
        "the answers that they give, without budget and lookup, each side alone.",
        "Development: k/n and 95 % Wilson interval over all subsets of the run. The selected one "
        "is the cheapest of all tried that the same rows let pass, so its figures are better than "
        "on other rows. Increase: wrong rows above Full KV's, and the 95 % score interval of "
        "paired data (Tango 1998).",
        "Tolerance: the gate includes it, so a candidate may fail that many rows more than Full KV "
        "and no more. Distinct: candidates of other thresholds may be the same levels.",
        f"Test: entries of {DECODE_ONLY} that follow the policy, with their budget; reached decode "
        "B is what they kept there, all resident bytes counted. Test less development: the two "
        "increases over all subsets of each; the samples may weigh categories differently.",
        "Δ: paired bootstrap over clusters (rows with the same tool set), "
        f"{RESAMPLES:,} resamples, seed {SEED}.",
        "Paper: its Tables 4 and 5 as printed; its Full KV there is Qwen3-4B's on non-live rows, "
        "and it does not say how many development rows it has.",
    ]
    if elsewhere:
        notes.append(f"The run's answers are to {elsewhere}, not to test rows: test is not run.")
    else:
        missing = [
            ", ".join(one.families)
            for one in packed_sides(policies, "decode")
            if not decode_entries(one, config.entries)
        ]
        if missing:
            notes.append(f"No entry of {DECODE_ONLY} follows: {'; '.join(missing)}.")
    return notes
