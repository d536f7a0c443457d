"""From the floors to everything at HIGH, one adjacent upgrade at a time: nested candidates.

Three rankings of upgrades:

- "distortion": by rho_D of Equation 7, whose cost m(a', c) - m(a, c) is one token's;
- "distortion_per_byte": by D over the whole upgrade's cost, m times the bucket's tokens a row. D
  counts all of a bucket's tokens together, so under Equation 7 a bucket gains by having many;
- "round_robin": in turn, the ablation without D (section 4.3).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import fsum, inf
from typing import Any

from pask.methods.levels import Level
from pask.policy.actions import Ladder, level_named, m, short, stored_bits
from pask.policy.envelope import envelope
from pask.policy.evidence import BucketEvidence, Evidence
from pask.policy.floors import Thresholds
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


def worth(evidence: Evidence, upgrade: Upgrade) -> float:
    """What the bytes of an upgrade spare an answer: D over all positions that feel the bucket, by
    the upgrade's cost for all of the bucket's tokens.

    Both are a calibration row's mean, so buckets of the answer compare with those of the prompt. 0
    where the bucket has no tokens.
    """
    found = next(one for one in evidence.buckets if one.bucket == upgrade.bucket)
    if not found.tokens:
        return 0.0
    each = ratio(found, upgrade.start, upgrade.end, evidence.groups) / found.tokens
    return each * found.positions / evidence.rows


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
    whole = dict.fromkeys(floors, Level.HIGH)
    return _greedy(evidence, floors, whole, lambda found, level: (), per_byte=per_byte)


def path_below(
    evidence: Evidence,
    floors: Mapping[LayerBucket, Level],
    tau: Thresholds | None,
    ranking: str,
) -> tuple[Upgrade, ...]:
    """From RELEASE up to the floors: what is left of them where not even they fit a budget.

    Backwards, it is what happens as both thresholds are loosened by one factor: a bucket goes down
    when they reach its V-bar (Equation 6), so the least harmful go first. Of upgrades that one
    factor lets go (with tau None or 0 all that did harm) those with the smaller V-bar go first,
    then by rho_D, as `ranking` has it. The paper has nothing below the floors; the order is ours.
    """
    bars = {
        found.bucket: envelope({level: seen.v for level, seen in found.failures.items()})
        for found in evidence.buckets
    }
    last = evidence.ladder.actions[-2]

    def harm(found: BucketEvidence, level: Level) -> tuple[float, ...]:
        v_bar = bars[found.bucket][level]
        allowed = 0.0 if tau is None else tau.high if level is last else tau.low
        factor = 0.0 if v_bar <= 0 else v_bar / allowed if allowed else inf
        return -factor, -v_bar

    start = dict.fromkeys(floors, evidence.ladder.actions[0])
    per_byte = ranking == "distortion_per_byte"
    return _greedy(evidence, start, floors, harm, per_byte=per_byte)


def _greedy(
    evidence: Evidence,
    start: Mapping[LayerBucket, Level],
    stop: Mapping[LayerBucket, Level],
    first: Callable[[BucketEvidence, Level], tuple[float, ...]],
    *,
    per_byte: bool,
) -> tuple[Upgrade, ...]:
    """Adjacent upgrades from `start` to `stop`: by `first`, ascending, then as `greedy_path`."""
    groups, ladder = evidence.groups, evidence.ladder

    def eligible(index: int, level: Level) -> tuple[tuple[float, ...], float, int, int, Level]:
        found, above = evidence.buckets[index], ladder.above(level)
        bits = (stored_bits(above) - stored_bits(level)) * groups[found.bucket.group]
        worth = ratio(found, level, above, groups)
        if per_byte:
            worth = worth / found.tokens if found.tokens else 0.0
        return first(found, level), -worth, bits, index, level

    heap = [
        eligible(index, start[found.bucket])
        for index, found in enumerate(evidence.buckets)
        if start[found.bucket] < stop[found.bucket]
    ]
    heapq.heapify(heap)
    path = []
    while heap:
        _, rank, _, index, level = heap[0]
        bucket, above = evidence.buckets[index].bucket, ladder.above(level)
        path.append(Upgrade(bucket, level, above, -rank))
        if above < stop[bucket]:
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
