"""Protection floors a_min(q): the least level that task failures allow a bucket (Equation 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.policy.envelope import envelope
from pask.policy.evidence import Evidence
from pask.structure.buckets import LayerBucket


@dataclass(frozen=True)
class Thresholds:
    """tau: increases in the failure rate, as proportions; ValueError unless 0 <= low <= high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"thresholds: 0 <= {self.low} <= {self.high} does not hold")


def floor(v_bar: Mapping[Level, float], ladder: Ladder, tau: Thresholds) -> Level:
    """a_min(q) of one bucket, from its envelope.

    Equation 6 has two steps: from R to L where V-bar(R) > tau.low, from the lowest bits to H where
    V-bar(L) > tau.high. On a longer ladder every step between levels below HIGH is taken as the
    first and the last one as the second: the floor is the lowest level whose V-bar is at most
    tau.low, tau.high for the highest level below HIGH; HIGH where there is none. V-bar falls along
    the ladder and tau.low <= tau.high, so for R, L, H this is Equation 6. A ladder R, H has the
    second step only. An increase of exactly tau is allowed.
    """
    *lower, last, high = ladder.actions
    for level in lower:
        if v_bar[level] <= tau.low:
            return level
    return last if v_bar[last] <= tau.high else high


def floors(evidence: Evidence, tau: Thresholds) -> dict[LayerBucket, Level]:
    """a_min of every bucket, in the evidence's order."""
    return {
        found.bucket: floor(
            envelope({level: failures.v for level, failures in found.failures.items()}),
            evidence.ladder,
            tau,
        )
        for found in evidence.buckets
    }


def no_floors(evidence: Evidence) -> dict[LayerBucket, Level]:
    """RELEASE for every bucket: the ablation without V (section 4.3)."""
    return {found.bucket: Level.RELEASE for found in evidence.buckets}
