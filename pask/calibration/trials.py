"""Which candidate policies are tried on development rows: some of each nested family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pask.digests import digest
from pask.methods.levels import Level
from pask.methods.pask import PASK
from pask.policy.actions import short
from pask.policy.evidence import Evidence
from pask.policy.floors import Thresholds, floors, no_floors
from pask.policy.path import Upgrade, candidate, cost, ranked_path
from pask.structure.buckets import LayerBucket

Table = Mapping[LayerBucket, Level]


@dataclass(frozen=True)
class Nested:
    """One side's nested candidates from the floors of one pair of thresholds (None: no floors).

    `tried`: how many upgrades those candidates have that are tried, ascending.
    """

    evidence: Evidence
    tau: Thresholds | None
    floors: Table
    path: tuple[Upgrade, ...]
    tried: tuple[int, ...]

    def table(self, steps: int) -> Table:
        return candidate(self.floors, self.path, steps)

    @property
    def tables(self) -> dict[int, Table]:
        """Those that are tried, by their number of upgrades."""
        return {steps: self.table(steps) for steps in self.tried}


def nested_families(method: PASK, evidence: Evidence) -> list[Nested]:
    """One for each pair of thresholds of the method; Equations 6 and 7, or their ablations.

    Pairs that give equal floors give equal families, and all of them are listed.
    """
    pairs: Sequence[Thresholds | None] = method.thresholds
    if method.floors == "none":
        pairs = (None,)
    found = []
    for tau in pairs:
        least = no_floors(evidence) if tau is None else floors(evidence, tau)
        path = ranked_path(evidence, least, method.ranking)
        tried = spread(evidence, least, path, method.candidates)
        found.append(Nested(evidence, tau, least, path, tried))
    return found


def spread(
    evidence: Evidence, least: Table, path: Sequence[Upgrade], count: int
) -> tuple[int, ...]:
    """At most `count` numbers of upgrades, ascending: the floors, all at HIGH, and between them
    those whose cost is nearest to equal distances.

    ValueError for a count below 2. Each is C_KV as calibration expects it.
    """
    if count < 2:
        raise ValueError(f"candidates: {count} of a path, at least its two ends are tried")
    costs = [cost(evidence, least)]
    table = dict(least)
    for upgrade in path:
        table[upgrade.bucket] = upgrade.end
        costs.append(cost(evidence, table))
    low, high = costs[0], costs[-1]
    wanted = [low + (high - low) * n / (count - 1) for n in range(count)]
    nearest = {min(range(len(costs)), key=lambda n: abs(costs[n] - aim)) for aim in wanted}
    return tuple(sorted(nearest | {0, len(path)}))


def table_key(side: str, table: Table) -> str:
    """A name for a side's table: the same for equal tables, whatever they were made by."""
    below = [
        [bucket.name, bucket.group, short(level)]
        for bucket, level in sorted(table.items())
        if level < Level.HIGH
    ]
    return digest([side, below])[:16]


def distinct(families: Iterable[Nested]) -> dict[str, tuple[str, Table]]:
    """By key, the side and table of every candidate that is tried, each once."""
    return {
        table_key(family.evidence.side, table): (family.evidence.side, table)
        for family in families
        for table in family.tables.values()
    }
