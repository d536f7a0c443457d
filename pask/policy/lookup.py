"""Algorithm 2 for one decoded token: table look-ups and a remaining budget, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import inf

from pask.methods.levels import Level
from pask.policy.actions import Ladder, stored_bits, token_cost
from pask.policy.path import ratio
from pask.policy.policy import SidePolicy
from pask.structure.buckets import LayerBucket

Levels = tuple[Level, ...]
"""A token's level in each layer group."""

_Rank = Mapping[tuple[int, Level], int]
"""A name's adjacent upgrades by layer group and level to leave, in the order of promotion."""


class TokenLookup:
    """A side's tables, one record a bucket name; `decide` answers for one token.

    It keeps no state of a request: R_{t+1} = R_t - cost is the caller's. Levels that it works out
    are remembered, so each combination costs once.

    `reserve`: Gamma by bucket name; a name that is not in it has none.
    """

    def __init__(self, side: SidePolicy, reserve: Mapping[str, float]) -> None:
        groups = side.evidence.groups
        self.groups = groups
        self._unknown = (Level.HIGH,) * len(groups), token_cost([Level.HIGH] * len(groups), groups)
        self._records: dict[str, tuple[_State, float, float]] = {}
        for name in dict.fromkeys(found.bucket.name for found in side.evidence.buckets):
            state = _initial(side, name)
            self._records[name] = state, reserve.get(name, 0.0), state.at_floors.cost

    def expected(self, name: str) -> tuple[float, float]:
        """What a token costs at its floors and at its selected levels, in tokens at HIGH."""
        record = self._records.get(name)
        return (1.0, 1.0) if record is None else (record[2], record[0].cost)

    def decide(
        self,
        name: str,
        remaining: float,
        critical: bool,
        floors_ahead: float = inf,
        selected_ahead: float = 0.0,
    ) -> tuple[Levels, float]:
        """The token's level in each layer group and its cost; budgets in tokens at HIGH.

        `remaining`: R_t. `critical`: whether the state is critical or lookahead-critical.
        `floors_ahead`, `selected_ahead`: what this token and all after it are taken to cost at
        their floors and at their selected levels; left out, the paper's rule to the letter.

        It begins with the larger of selected level and floor (Equation 10). While that costs more
        than B_t = max(0, R_t - Gamma(s_t)), where Gamma is no more than `floors_ahead` after this
        token, the level above its floor whose loss of distortion per saved cost is least goes down
        by one. In a critical state the upgrade with the largest rho_D among those that fit B_t, and
        leave `selected_ahead` for the tokens after this one, is taken until none does. Floors stay
        where they are whatever the budget, so the cost may be above B_t. Of equal ratios the
        cheaper upgrade comes first, then the earlier group, and demotion is in the reverse order;
        without ranking by distortion a level for each group in turn, counted from the floors.

        A name without evidence, or in a group without, is at HIGH there: it was never judged.
        """
        record = self._records.get(name)
        if record is None:
            return self._unknown
        state, reserved, least = record
        budget = max(0.0, remaining - min(reserved, max(0.0, floors_ahead - least)))
        spare = min(budget, remaining - max(0.0, selected_ahead - state.cost))
        while state.cost > budget and state.demoted is not None:
            state = state.demoted
        while critical:
            for promoted in state.promoted:
                if promoted.cost <= spare:
                    state = promoted
                    break
            else:
                break
        return state.levels, state.cost


class _Name:
    """What the states of one bucket name share: floors, ranks, and the states made so far."""

    def __init__(self, ladder: Ladder, groups: tuple[int, ...], floors: Levels, rank: _Rank):
        self.groups, self.floors, self.rank = groups, floors, rank
        self.above = dict(ladder.upgrades)
        self.below = {end: start for start, end in ladder.upgrades}
        self._states: dict[Levels, _State] = {}

    def state(self, levels: Levels) -> _State:
        return self._states.setdefault(levels, _State(self, levels))


class _State:
    """One combination of levels, with the combinations one demotion or promotion away."""

    def __init__(self, name: _Name, levels: Levels) -> None:
        self._name = name
        self.levels = levels
        self.cost = token_cost(levels, name.groups)

    @property
    def at_floors(self) -> _State:
        """The same name at its floors."""
        return self._name.state(self._name.floors)

    @cached_property
    def demoted(self) -> _State | None:
        """One level lower where that loses least; None when all groups are at their floors."""
        name, last = self._name, None
        for group, level in enumerate(self.levels):
            if level > name.floors[group]:
                below = name.below[level]
                rank = name.rank[group, below]
                if last is None or rank > last[0]:
                    last = rank, group, below
        return None if last is None else self._with(last[1], last[2])

    @cached_property
    def promoted(self) -> tuple[_State, ...]:
        """One level higher in one group, the most worthwhile first."""
        name = self._name
        order = sorted(
            (name.rank[group, level], group, name.above[level])
            for group, level in enumerate(self.levels)
            if level < Level.HIGH
        )
        return tuple(self._with(group, above) for _, group, above in order)

    def _with(self, group: int, level: Level) -> _State:
        return self._name.state((*self.levels[:group], level, *self.levels[group + 1 :]))


def _initial(side: SidePolicy, name: str) -> _State:
    """The selected levels of a name, and through it all that can become of them."""
    ladder, groups = side.evidence.ladder, side.evidence.groups
    buckets = [LayerBucket(name, group) for group in range(len(groups))]
    floors = tuple(side.floors.get(bucket, Level.HIGH) for bucket in buckets)
    selected = (side.table.get(bucket, Level.HIGH) for bucket in buckets)
    levels = tuple(max(a, least) for a, least in zip(selected, floors, strict=True))
    return _Name(ladder, groups, floors, _ranks(side, name, floors)).state(levels)


def _ranks(side: SidePolicy, name: str, floors: Levels) -> _Rank:
    """0 is promoted first and demoted last."""
    ladder, groups = side.evidence.ladder, side.evidence.groups
    keys: dict[tuple[int, Level], tuple[float, ...]] = {}
    for found in side.evidence.buckets:
        if found.bucket.name != name:
            continue
        group = found.bucket.group
        first = ladder.actions.index(floors[group])
        for turn, (level, above) in enumerate(ladder.upgrades[first:]):
            if side.ranking != "round_robin":  # the groups of a name have equally many tokens
                bits = (stored_bits(above) - stored_bits(level)) * groups[group]
                keys[group, level] = -ratio(found, level, above, groups), bits, group
            else:
                keys[group, level] = turn, group
    return {step: rank for rank, step in enumerate(sorted(keys, key=keys.__getitem__))}
