"""What calibration measured about the buckets of one side: distortion, failures, occurrences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite, sqrt
from statistics import NormalDist
from typing import Any

from pask.methods.levels import Level
from pask.policy.actions import Ladder, level_named, short
from pask.structure.buckets import LayerBucket

SIDES = ("decode", "prompt")


@dataclass(frozen=True)
class Failures:
    """How often answers failed with one bucket at one action, all else at HIGH, row by row.

    `rows` counts all calibration rows: one without the bucket has the reference's outcome.
    ValueError unless lost + gained <= touched <= rows and there is a row.
    """

    rows: int
    lost: int  # right under the reference, wrong under the intervention
    gained: int  # the other way round
    touched: int  # rows in which the bucket occurs

    def __post_init__(self) -> None:
        if min(self.lost, self.gained) < 0 or self.rows < 1:
            raise ValueError(f"failures: impossible counts {self}")
        if not self.lost + self.gained <= self.touched <= self.rows:
            raise ValueError(f"failures: a row without the bucket cannot differ, {self}")

    @property
    def v(self) -> float:
        """V(q, a) of Equation 5: P_fail(q, a) - P_fail(q, H), the difference of paired rates."""
        return (self.lost - self.gained) / self.rows

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Score interval of V for paired data (Tango 1998, Statistics in Medicine 17:891).

        All differences d in -1..1 that the score test of H0: V = d does not reject. Unlike
        Newcombe's, it needs no more than rows, lost and gained.
        """
        z = NormalDist().inv_cdf(0.5 + level / 2)
        low = _crossing(lambda d: self._score(d) > z, -1.0, self.v)
        high = _crossing(lambda d: self._score(d) > -z, self.v, 1.0)
        return low, high

    def _score(self, d: float) -> float:
        """Tango's statistic for -1 < d < 1; it falls in d and is 0 at V."""
        n, excess = self.rows, self.lost - self.gained - self.rows * d
        # The share of gained rows is the likelier root under the null hypothesis.
        linear = (2 * n - self.lost + self.gained) * d - self.lost - self.gained
        constant = -self.gained * d * (1 - d)
        gained = (sqrt(max(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
        variance = n * (2 * gained + d * (1 - d))
        if variance <= 0:
            return inf if excess > 0 else -inf if excess < 0 else 0.0
        return excess / sqrt(variance)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Failures:
        return cls(**value)


def _crossing(before: Callable[[float], bool], low: float, high: float) -> float:
    """Where `before` turns from true to false between the two, by halving."""
    for _ in range(60):
        middle = (low + high) / 2
        if before(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class BucketEvidence:
    """What was measured about q = (z, c).

    `distortion` has every level of the ladder, HIGH with 0, and `failures` every one but HIGH;
    `positions` is |S(q)|, the positions that D is a mean over. ValueError for a number that is
    negative or not finite and for HIGH other than 0.
    """

    bucket: LayerBucket
    tokens: float  # mean occurrences a calibration row
    distortion: Mapping[Level, float]  # D(q, a), Equation 4
    failures: Mapping[Level, Failures]
    positions: int

    def __post_init__(self) -> None:
        numbers = (self.tokens, *self.distortion.values(), self.positions)
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"evidence of {self.bucket}: a number is negative or not finite")
        if self.distortion.get(Level.HIGH) != 0:
            raise ValueError(f"evidence of {self.bucket}: the distortion at H has to be 0")

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.bucket.name,
            "group": self.bucket.group,
            "tokens": self.tokens,
            "distortion": {short(a): value for a, value in self.distortion.items()},
            "failures": {short(a): found.to_json() for a, found in self.failures.items()},
            "positions": self.positions,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> BucketEvidence:
        return cls(
            LayerBucket(value["name"], value["group"]),
            value["tokens"],
            {level_named(a): number for a, number in value["distortion"].items()},
            {level_named(a): Failures.from_json(found) for a, found in value["failures"].items()},
            value["positions"],
        )


@dataclass(frozen=True)
class Evidence:
    """One side of one model. The order of `buckets` decides wherever two are equal.

    ValueError for a bucket that is there twice, has a group that is not, or lacks a level.
    """

    side: str  # "decode" or "prompt"
    ladder: Ladder
    groups: tuple[int, ...]  # layers in each group
    rows: int  # calibration rows
    buckets: tuple[BucketEvidence, ...]

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ValueError(f"evidence: unknown side {self.side!r}")
        if not self.groups or min(self.groups) < 1:
            raise ValueError(f"evidence: groups of {self.groups} layers")
        if len({found.bucket for found in self.buckets}) < len(self.buckets):
            raise ValueError("evidence: a bucket is there twice")
        actions = set(self.ladder.actions)
        for found in self.buckets:
            if not 0 <= found.bucket.group < len(self.groups):
                raise ValueError(f"evidence of {found.bucket}: there is no such layer group")
            if set(found.distortion) != actions or set(found.failures) != actions - {Level.HIGH}:
                raise ValueError(f"evidence of {found.bucket}: not the levels {self.ladder}")

    @property
    def layers(self) -> int:
        return sum(self.groups)

    def to_json(self) -> dict[str, Any]:
        return {
            "side": self.side,
            "ladder": str(self.ladder),
            "groups": list(self.groups),
            "rows": self.rows,
            "buckets": [found.to_json() for found in self.buckets],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Evidence:
        return cls(
            value["side"],
            Ladder.parse(value["ladder"]),
            tuple(value["groups"]),
            value["rows"],
            tuple(BucketEvidence.from_json(found) for found in value["buckets"]),
        )
