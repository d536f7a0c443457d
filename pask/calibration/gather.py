"""Sums measured calibration rows to the evidence that a policy is made from (Equations 4 and 5)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pask.errors import HarnessFault
from pask.methods.levels import Level
from pask.policy.actions import Ladder, level_named, short
from pask.policy.evidence import SIDES, BucketEvidence, Evidence, Failures
from pask.structure.buckets import LayerBucket, all_buckets
from pask.structure.labels import Label

_COUNTED = dict(zip(SIDES, ("names", "labels"), strict=True))
"""By side, the field of a line that says which names occur."""

_TOTALS = {"local": ("distortions", "total"), "propagated": ("outcomes", "propagated")}
"""By reading of Equation 4, the field of a line with its totals, and their name there."""


def gather(
    lines: Iterable[Mapping[str, Any]],
    *,
    ladder: Ladder,
    groups: Sequence[int],
    coarsening: str,
    distortion: str = "local",
    positions: str = "affected",
) -> tuple[Evidence, Evidence]:
    """The evidence of the decode side and of the prompt side, from `pask.calibration.rows`' lines.

    D(q, a) is the sum of the rows' totals over the sum of their positions, 0 where no position ever
    felt the bucket. `distortion` "local" takes `pask.calibration.distortion`'s totals, "propagated"
    those of the replays. `positions`, S(q): "affected" are those that read a changed token, "all"
    those of all rows, which makes D what a bucket costs an average position. V(q, a) compares rows
    one by one with their reference; a row without the bucket counts too, with the reference's
    outcome. `groups`: layers in each group. Buckets come by name in the order of `all_buckets` or
    `Label`, group by group.

    HarnessFault for no lines, and for a row that lacks an outcome which this ladder, these groups
    and this coarsening ask for.
    """
    sums = {side: _Sums() for side in SIDES}
    rows = everywhere = 0
    for line in lines:
        rows += 1
        everywhere += line["fed" if distortion == "local" else "replayed"]
        for side in SIDES:
            sums[side].count(line[_COUNTED[side]])
        for record in line["outcomes"]:
            lost = line["reference_correct"] and not record["correct"]
            gained = record["correct"] and not line["reference_correct"]
            sums[record["side"]].outcomes[_key(record)].update(
                touched=1, lost=int(lost), gained=int(gained)
            )
        records, total = _TOTALS[distortion]
        for record in line[records]:
            sums[record["side"]].distorted(_key(record), record[total], record["positions"])
    if positions == "all":
        for one in sums.values():
            one.positions = defaultdict(lambda: everywhere)
    if not rows:
        raise HarnessFault("no calibration row was measured", where="evidence")
    orders = dict(zip(SIDES, (all_buckets(coarsening), [label.value for label in Label]),
                      strict=True))  # fmt: skip
    decode, prompt = (
        Evidence(
            side=side,
            ladder=ladder,
            groups=tuple(groups),
            rows=rows,
            buckets=tuple(
                sums[side].evidence(side, LayerBucket(name, group), ladder, rows)
                for name in _ordered(side, sums[side].tokens, orders[side])
                for group in range(len(groups))
            ),
        )
        for side in SIDES
    )
    return decode, prompt


_Key = tuple[LayerBucket, Level]


def _key(record: Mapping[str, Any]) -> _Key:
    return LayerBucket(record["bucket"], record["group"]), level_named(record["level"])


def _ordered(side: str, found: Iterable[str], order: Sequence[str]) -> list[str]:
    if strange := sorted(set(found) - set(order)):
        raise HarnessFault(
            f"rows were measured by another coarsening: {strange[0]}", where=f"evidence, {side}"
        )
    return sorted(found, key=order.index)


@dataclass
class _Sums:
    """Over the rows, of one side."""

    tokens: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)  # in which the name occurs
    outcomes: dict[_Key, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    totals: dict[_Key, float] = field(default_factory=lambda: defaultdict(float))
    positions: dict[_Key, int] = field(default_factory=lambda: defaultdict(int))

    def count(self, found: Sequence[str] | Mapping[str, int]) -> None:
        counts = Counter(found)
        self.tokens.update(counts)
        self.rows.update(counts.keys())

    def distorted(self, key: _Key, total: float, positions: int) -> None:
        self.totals[key] += total
        self.positions[key] += positions

    def evidence(self, side: str, bucket: LayerBucket, ladder: Ladder, rows: int) -> BucketEvidence:
        where = f"evidence, {side} {bucket.name}, group {bucket.group}"
        distortion, failures = {Level.HIGH: 0.0}, {}
        for level, _ in ladder.upgrades:
            key = bucket, level
            seen = self.outcomes[key]
            if seen["touched"] != self.rows[bucket.name]:
                raise HarnessFault(
                    f"{seen['touched']} rows have an outcome at {short(level)}, "
                    f"{self.rows[bucket.name]} have the bucket",
                    where=where,
                )
            failures[level] = Failures(rows, seen["lost"], seen["gained"], seen["touched"])
            positions = self.positions[key]
            distortion[level] = self.totals[key] / positions if positions else 0.0
        return BucketEvidence(
            bucket=bucket,
            tokens=self.tokens[bucket.name] / rows,
            distortion=distortion,
            failures=failures,
            positions=self.positions[bucket, ladder.actions[0]],
        )
