"""From the floors to everything at HIGH, one adjacent upgrade at a time: nested candidates.

Three rankings of upgrades:

- "distortion": by rho_D of Equation 7, whose cost m(a', c) - m(a, c) is one token's;
- "distortion_per_byte": by D over the whole upgrade's cost, m times the bucket's tokens a row. D
  counts all of a bucket's tokens together, so under Equation 7 a bucket gains by having many;
- "round_robin": in turn, the ablation without D (section 4.3).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import fsum
from typing import Any

from pask.methods.levels import Level
from pask.policy.actions import Ladder, level_named, m, short, stored_bits
from pask.policy.evidence import BucketEvidence, Evidence
from pask.structure.buckets import LayerBucket

RANKINGS = ("distortion", "distortion_per_byte", "round_robin")


@dataclass(frozen=True)
class Upgrade:
    """`bucket` goes from `start` to the next level, `end`; `ratio` is its rho_D, in the ranking by
    bytes divided by the bucket's tokens."""

    bucket: LayerBucket
    start: Level
    end: Level
    ratio: float

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.bucket.name,
            "group": self.bucket.group,
            "start": short(self.start),
            "end": short(self.end),
            "ratio": self.ratio,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Upgrade:
        bucket = LayerBucket(value["name"], value["group"])
        return cls(bucket, level_named(value["start"]), level_named(value["end"]), value["ratio"])


def ratio(found: BucketEvidence, a: Level, a2: Level, groups: Sequence[int]) -> float:
    """rho_D(q, a -> a2) of Equation 7: the distortion that a unit of m buys, of one token.

    `groups`: layers in each group. ValueError unless a < a2.
    """
    if not a < a2:
        raise ValueError(f"ratio: {a.name} -> {a2.name} is no upgrade")
    size, layers = groups[found.bucket.group], sum(groups)
    bits = (stored_bits(a2) - stored_bits(a)) * size
    less = max(0.0, found.distortion[a] - found.distortion[a2])
    # The cost is bits / (bits at HIGH * layers); dividing last keeps equal ratios equal floats.
    return less * (stored_bits(Level.HIGH) * layers) / bits


def ranked_path(
    evidence: Evidence, floors: Mapping[LayerBucket, Level], ranking: str
) -> tuple[Upgrade, ...]:
    """The path of one of `RANKINGS`; ValueError for another."""
    if ranking not in RANKINGS:
        raise ValueError(f"path: unknown ranking {ranking!r}")
    if ranking == "round_robin":
        return round_robin_path(evidence, floors)
    return greedy_path(evidence, floors, per_byte=ranking == "distortion_per_byte")


def greedy_path(
    evidence: Evidence, floors: Mapping[LayerBucket, Level], *, per_byte: bool = False
) -> tuple[Upgrade, ...]:
    """From the floors, always the eligible adjacent upgrade with the largest rho_D, to all HIGH.

    Eligible is the next upgrade of every bucket below HIGH. Of equal ratios the upgrade with the
    smaller cost m(a2, c) - m(a, c) comes first, then the bucket that the evidence has first. With
    `per_byte` ratios are divided by the bucket's tokens a row; one without tokens comes last.
    """
    groups, ladder = evidence.groups, evidence.ladder

    def eligible(index: int, level: Level) -> tuple[float, int, int, Level]:
        found, above = evidence.buckets[index], ladder.above(level)
        bits = (stored_bits(above) - stored_bits(level)) * groups[found.bucket.group]
        worth = ratio(found, level, above, groups)
        if per_byte:
            worth = worth / found.tokens if found.tokens else 0.0
        return -worth, bits, index, level

    heap = [
        eligible(index, floors[found.bucket])
        for index, found in enumerate(evidence.buckets)
        if floors[found.bucket] < Level.HIGH
    ]
    heapq.heapify(heap)
    path = []
    while heap:
        rank, _, index, level = heap[0]
        above = ladder.above(level)
        path.append(Upgrade(evidence.buckets[index].bucket, level, above, -rank))
        if above < Level.HIGH:
            heapq.heapreplace(heap, eligible(index, above))
        else:
            heapq.heappop(heap)
    return tuple(path)


def round_robin_path(
    evidence: Evidence, floors: Mapping[LayerBucket, Level]
) -> tuple[Upgrade, ...]:
    """One level for every bucket in turn, in the evidence's order, until all are at HIGH.

    The ablation without D-ranking (section 4.3): the ratios are noted and decide nothing.
    """
    table, path = dict(floors), []
    while any(table[found.bucket] < Level.HIGH for found in evidence.buckets):
        for found in evidence.buckets:
            level = table[found.bucket]
            if level < Level.HIGH:
                above = evidence.ladder.above(level)
                score = ratio(found, level, above, evidence.groups)
                path.append(Upgrade(found.bucket, level, above, score))
                table[found.bucket] = above
    return tuple(path)


def candidate(
    floors: Mapping[LayerBucket, Level], path: Sequence[Upgrade], steps: int
) -> dict[LayerBucket, Level]:
    """Theta_i: the floors after the first `steps` upgrades; each holds the one before it.

    ValueError for more steps than the path has, and for an upgrade that does not start where its
    bucket is.
    """
    if not 0 <= steps <= len(path):
        raise ValueError(f"candidate: {steps} of {len(path)} steps")
    table = dict(floors)
    for upgrade in islice(path, steps):
        if table.get(upgrade.bucket) != upgrade.start:
            raise ValueError(f"candidate: {upgrade} does not start where its bucket is")
        table[upgrade.bucket] = upgrade.end
    return table


def check_path(
    ladder: Ladder, floors: Mapping[LayerBucket, Level], path: Sequence[Upgrade]
) -> None:
    """ValueError unless the path leads from the floors to all HIGH by adjacent upgrades."""
    for upgrade in path:
        if (upgrade.start, upgrade.end) not in ladder.upgrades:
            raise ValueError(f"path: {upgrade} is no adjacent upgrade of {ladder}")
    left = [q for q, level in candidate(floors, path, len(path)).items() if level < Level.HIGH]
    if left:
        raise ValueError(f"path: it ends before {left[0]} is at H")


def cost(evidence: Evidence, table: Mapping[LayerBucket, Level]) -> float:
    """C_KV of Equation 1 as calibration rows expect it: the side's bytes over all of it at HIGH.

    A bucket counts by its tokens a row and the layers of its group. ValueError where no bucket has
    tokens.
    """
    layers = evidence.layers

    def total(levels: Iterator[Level]) -> float:
        return fsum(
            found.tokens * m(level, evidence.groups[found.bucket.group], layers)
            for found, level in zip(evidence.buckets, levels, strict=True)
        )

    whole = total(Level.HIGH for _ in evidence.buckets)
    if not whole:
        raise ValueError("cost: no bucket has tokens")
    return total(table[found.bucket] for found in evidence.buckets) / whole
