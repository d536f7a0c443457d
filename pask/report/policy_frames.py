"""What policy files say, as data frames: every bucket, every candidate that was tried.

Percentages, points and shares stay unrounded here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import nan

import pandas as pd

from pask.digests import digest
from pask.methods.levels import Level
from pask.policy.actions import short
from pask.policy.envelope import envelope
from pask.policy.floors import Thresholds, floors, no_floors
from pask.policy.path import candidate, ranked_path
from pask.policy.policy import Policy, Scanned, SidePolicy

# As the paper's Table 4 calls them: with both parts of a policy, and with one or both left out.
FULL, PER_BYTE, NO_RANKING, NO_FLOORS, NEITHER = ROLES = (
    "PASK",
    "PASK, ranked per byte",
    "w/o D-ranking",
    "w/o V-floor",
    "w/o D-ranking and V-floor",
)


@dataclass(frozen=True)
class PackedSide:
    """One side as it is in the policy files of `families`, equal in all of them."""

    side: SidePolicy
    families: tuple[str, ...]

    @property
    def role(self) -> str:
        """What of the paper's policy it has, by its own content."""
        if self.side.tau is None:
            return NEITHER if self.side.ranking == "round_robin" else NO_FLOORS
        if self.side.ranking == "round_robin":
            return NO_RANKING
        return PER_BYTE if self.side.ranking == "distortion_per_byte" else FULL

    @property
    def chosen(self) -> Scanned | None:
        """What development rows saw of the selected candidate; None where none were tried."""
        wanted = self.side.tau, self.side.steps
        return next((c for c in self.side.candidates if (c.tau, c.steps) == wanted), None)


def packed_sides(policies: Mapping[str, Policy], name: str) -> list[PackedSide]:
    """The policies' different sides called `name`, by role, then in the families' order."""
    found: dict[str, tuple[SidePolicy, list[str]]] = {}
    for family, policy in policies.items():
        side = policy.decode if name == "decode" else policy.prompt
        if side is not None:
            found.setdefault(digest(side.to_json()), (side, []))[1].append(family)
    packed = [PackedSide(side, tuple(families)) for side, families in found.values()]
    return sorted(packed, key=lambda one: ROLES.index(one.role))


def default_family(policies: Mapping[str, Policy]) -> str:
    """The first family whose decode side has floors and ranking; the first where none has."""
    return packed_sides(policies, "decode")[0].families[0]


def sides_of(policy: Policy) -> list[SidePolicy]:
    return [side for side in (policy.decode, policy.prompt) if side is not None]


def layer_names(groups: Sequence[int]) -> list[str]:
    """The layers of each group, first and last: groups of 2 and 1 layers are `0–1` and `2`."""
    ends = list(accumulate(groups))
    return [
        f"{end - size}–{end - 1}" if size > 1 else str(end - 1)
        for size, end in zip(groups, ends, strict=True)
    ]


def bucket_frame(side: SidePolicy) -> pd.DataFrame:
    """One row a bucket and level below HIGH, in the evidence's order.

    `v_pp` is V of Equation 5 in points with its interval, `v_bar_pp` its envelope, `distortion` D
    of Equation 4; `floor` and `action` are the bucket's, whatever the row's level.
    """
    evidence, layers = side.evidence, layer_names(side.evidence.groups)
    records = []
    for found in evidence.buckets:
        bars = envelope({level: failures.v for level, failures in found.failures.items()})
        for level in evidence.ladder.actions[:-1]:
            failures = found.failures[level]
            low, high = failures.interval()
            records.append(
                {
                    "side": evidence.side,
                    "bucket": found.bucket.name,
                    "group": found.bucket.group,
                    "layers": layers[found.bucket.group],
                    "tokens": found.tokens,
                    "positions": found.positions,
                    "level": short(level),
                    "distortion": found.distortion[level],
                    "rows": failures.rows,
                    "touched": failures.touched,
                    "lost": failures.lost,
                    "gained": failures.gained,
                    "v_pp": 100 * failures.v,
                    "v_low": 100 * low,
                    "v_high": 100 * high,
                    "v_bar_pp": 100 * bars[level],
                    "floor": short(side.floors[found.bucket]),
                    "action": short(side.table[found.bucket]),
                }
            )
    return pd.DataFrame(records)


def cheapest(candidates: Sequence[Scanned], alpha: float) -> Scanned | None:
    """Equation 8: least cost within alpha; of equal ones fewer failures, then the first listed."""
    admissible = [
        (seen.cost, seen.failures, at) for at, seen in enumerate(candidates) if seen.within(alpha)
    ]
    return candidates[min(admissible)[2]] if admissible else None


def percent_pair(tau: Thresholds | None) -> tuple[float, float]:
    """tau in per cent; NaN without floors."""
    if tau is None:
        return nan, nan
    # 100 * 0.07 is 7.000000000000001; nobody asks for more than six decimals of a per cent.
    return round(100 * tau.low, 6), round(100 * tau.high, 6)


def candidate_frame(side: SidePolicy) -> pd.DataFrame:
    """One row a candidate tried: `b` is its C_KV, `increase_pp` how much more often it fails."""
    records = []
    for seen in side.candidates:
        low, high = seen.interval()
        tau_low, tau_high = percent_pair(seen.tau)
        records.append(
            {
                "side": side.evidence.side,
                "tau_low_pct": tau_low,
                "tau_high_pct": tau_high,
                "steps": seen.steps,
                "b": seen.cost,
                "rows": seen.rows,
                "failures": seen.failures,
                "reference_failures": seen.reference_failures,
                "increase_pp": 100 * seen.increase,
                "increase_low": 100 * low,
                "increase_high": 100 * high,
                "within": int(seen.within(side.alpha)),
                "selected": int((seen.tau, seen.steps) == (side.tau, side.steps)),
            }
        )
    columns = [
        "side", "tau_low_pct", "tau_high_pct", "steps", "b", "rows", "failures",
        "reference_failures", "increase_pp", "increase_low", "increase_high", "within", "selected",
    ]  # fmt: skip
    return pd.DataFrame(records, columns=columns)


def frontier(side: SidePolicy, upto: float = 0.10) -> pd.DataFrame:
    """The cost of the cheapest admissible candidate against alpha: Figure 3.

    One row at alpha 0, one wherever the candidate changes, one at `upto`. Columns: side, alpha_pp,
    b, tau_low_pct, tau_high_pct, steps.
    """
    steps_at = {seen.increase for seen in side.candidates if 0 < seen.increase <= upto}
    records: list[dict[str, object]] = []
    last = None
    for alpha in sorted(steps_at | {0.0, upto}):
        found = cheapest(side.candidates, alpha)
        if found is not None and (found is not last or alpha == upto):
            tau_low, tau_high = percent_pair(found.tau)
            records.append(
                {
                    "side": side.evidence.side,
                    "alpha_pp": 100 * alpha,
                    "b": found.cost,
                    "tau_low_pct": tau_low,
                    "tau_high_pct": tau_high,
                    "steps": found.steps,
                }
            )
        last = found
    columns = ["side", "alpha_pp", "b", "tau_low_pct", "tau_high_pct", "steps"]
    return pd.DataFrame(records, columns=columns)


def distinct_candidates(side: SidePolicy) -> int:
    """How many different tables the tried candidates are: other thresholds may give equal ones."""
    evidence = side.evidence
    least = {
        tau: no_floors(evidence) if tau is None else floors(evidence, tau)
        for tau in {seen.tau for seen in side.candidates}
    }
    paths = {tau: ranked_path(evidence, table, side.ranking) for tau, table in least.items()}
    tables: set[tuple[Level, ...]] = set()
    for seen in side.candidates:
        table = candidate(least[seen.tau], paths[seen.tau], seen.steps)
        tables.add(tuple(table[found.bucket] for found in evidence.buckets))
    return len(tables)
