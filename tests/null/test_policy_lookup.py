"""Algorithm 2 for one token: by hand, against a literal second version, and its promises."""

from __future__ import annotations

from fractions import Fraction
from math import nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.methods.levels import Level
from pask.policy.evidence import Evidence
from pask.policy.floors import Thresholds
from pask.policy.lookup import TokenLookup
from pask.policy.policy import SidePolicy
from tests.null.policy_tables import L4, H, R, evidence, evidences, found, packed, taus

# Three groups of one layer; costs in 48ths: R 0, L4 5, H 16. Distortion saved by R -> L4, L4 -> H:
TABLE = evidence(
    found("a", 0, {R: 25.0, L4: 22.0}),  # 3/5, 22/11
    found("a", 1, {R: 64.0, L4: 44.0}, {R: 2}),  # 20/5, 44/11; its floor is L4
    found("a", 2, {R: 10.0, L4: 0.0}),  # 10/5, 0
    groups=(1, 1, 1),
)
TAU = Thresholds(0.005, 0.01)
# The path: group 1 to H (4), group 2 to L4 (2), group 0 to L4 (0.6) and H (2), group 2 to H (0).
PATH = [(R, H, R), (R, H, L4), (L4, H, L4), (H, H, L4), (H, H, H)]


@pytest.mark.parametrize("steps", range(1, 6))
def test_with_budget_enough_the_selected_levels_stay(steps: int) -> None:
    lookup = TokenLookup(packed(TABLE, TAU, steps), {})
    levels, cost = lookup.decide("a", 1.0, critical=False)
    assert levels == PATH[steps - 1]
    assert cost == sum({R: 0, L4: 5, H: 16}[level] for level in levels) / 48


@pytest.mark.parametrize(
    ("budget", "levels"),
    [
        (48, (H, H, H)),
        (47, (H, H, L4)),  # the loss by saved cost: 0 first
        (37, (H, H, L4)),
        (36, (L4, H, L4)),  # 2, as dear as group 2's other step but dearer in cost: it goes first
        (26, (L4, H, L4)),
        (25, (R, H, L4)),  # 0.6, only now the last of group 0's steps
        (20, (R, H, R)),
        (15, (R, L4, R)),
    ],
)
def test_demotion_in_ascending_loss_by_saved_cost(budget: int, levels: tuple[Level, ...]) -> None:
    lookup = TokenLookup(packed(TABLE, TAU, 5), {})
    assert lookup.decide("a", budget / 48, critical=False)[0] == levels


def test_floors_win_over_the_budget() -> None:
    lookup = TokenLookup(packed(TABLE, TAU, 5), {"a": 0.5})
    for remaining in (0.5, 0.0, -3.0):
        for critical in (False, True):
            assert lookup.decide("a", remaining, critical) == ((R, L4, R), 5 / 48)


@pytest.mark.parametrize(
    ("budget", "levels"),
    [
        (5, (R, L4, R)),
        (9, (R, L4, R)),
        (10, (R, L4, L4)),  # group 1 to H, 4, takes 11; the next best that fits is group 2's
        (15, (L4, L4, L4)),
        (16, (R, H, R)),  # 4 fits first
        (21, (R, H, L4)),
        (26, (L4, H, L4)),
        (36, (L4, H, L4)),
        (37, (H, H, L4)),
        (48, (H, H, H)),
    ],
)
def test_promotion_in_descending_ratio_of_what_fits(budget: int, levels: tuple[Level, ...]) -> None:
    lookup = TokenLookup(packed(TABLE, TAU, 0), {})
    assert lookup.decide("a", budget / 48, critical=True)[0] == levels
    assert lookup.decide("a", budget / 48, critical=False)[0] == (R, L4, R)


def test_the_reserve_is_taken_from_what_remains() -> None:
    lookup = TokenLookup(packed(TABLE, TAU, 0), {"a": 0.25, "b": 1.0})
    assert lookup.decide("a", (37.5 + 12) / 48, critical=True)[0] == (H, H, L4)
    assert lookup.decide("a", (36.5 + 12) / 48, critical=True)[0] == (L4, H, L4)


def test_no_more_is_kept_back_than_is_still_to_come() -> None:
    """A token at its floors takes 5: of 9 that are expected at the floors, 4 come after it."""
    lookup = TokenLookup(packed(TABLE, TAU, 5), {"a": 0.25})
    assert lookup.decide("a", (36.5 + 12) / 48, False, floors_ahead=1.0)[0] == (L4, H, L4)
    assert lookup.decide("a", (37.5 + 4) / 48, False, floors_ahead=9 / 48)[0] == (H, H, L4)
    assert lookup.decide("a", (36.5 + 4) / 48, False, floors_ahead=9 / 48)[0] == (L4, H, L4)
    assert lookup.decide("a", 37.5 / 48, False, floors_ahead=-1.0)[0] == (H, H, L4)
    assert lookup.expected("a") == (5 / 48, 1.0)
    assert lookup.expected("never seen") == (1.0, 1.0)


def test_a_promotion_leaves_what_the_selected_levels_still_take() -> None:
    lookup = TokenLookup(packed(TABLE, TAU, 0), {})
    for remaining, levels in ((37.5, (H, H, L4)), (36.5, (L4, H, L4))):
        ahead = (20 + 5) / 48  # this token's 5, and 20
        assert lookup.decide("a", (remaining + 20) / 48, True, 1.0, ahead)[0] == levels
    # Selected levels are not demoted for it.
    lookup = TokenLookup(packed(TABLE, TAU, 5), {})
    assert lookup.decide("a", 1.0, True, 1.0, 3.0) == ((H, H, H), 1.0)


def test_a_cost_may_be_all_of_the_budget_and_not_a_hair_more() -> None:
    lookup = TokenLookup(packed(TABLE, TAU, 0), {})
    assert lookup.decide("a", 37 / 48, critical=True) == ((H, H, L4), 37 / 48)
    assert lookup.decide("a", nextafter(37 / 48, 0), critical=True)[0] == (L4, H, L4)
    lookup = TokenLookup(packed(TABLE, TAU, 5), {})
    assert lookup.decide("a", 37 / 48, critical=False) == ((H, H, L4), 37 / 48)
    assert lookup.decide("a", nextafter(37 / 48, 0), critical=False)[0] == (L4, H, L4)


def test_of_equal_groups_the_first_is_promoted_first_and_demoted_last() -> None:
    same = evidence(*(found("a", c, {R: 21.0, L4: 11.0}) for c in range(3)), groups=(2, 2, 2))
    lookup = TokenLookup(packed(same, TAU, 0), {})
    assert lookup.decide("a", 26 / 48, critical=True)[0] == (H, L4, L4)
    lookup = TokenLookup(packed(same, TAU, 6), {})
    assert lookup.decide("a", 47 / 48, critical=False)[0] == (H, H, L4)


def test_what_was_never_judged_stays_whole() -> None:
    lookup = TokenLookup(packed(TABLE, TAU, 0), {"b": 0.25})
    assert lookup.decide("b", 0.0, critical=False) == ((H, H, H), 1.0)
    partly = evidence(found("a", 1, {R: 1.0, L4: 0.5}), groups=(1, 1, 1))
    lookup = TokenLookup(packed(partly, TAU, 0), {})
    assert lookup.decide("a", 0.0, critical=False) == ((H, R, H), 32 / 48)


def test_without_ranking_groups_take_turns_from_their_floors() -> None:
    lookup = TokenLookup(packed(TABLE, TAU, 0, "round_robin"), {})
    promoted = [lookup.decide("a", budget / 48, True)[0] for budget in (5, 10, 21, 26, 37, 48)]
    # Group 0 to L4, group 1 to H, group 2 to L4; then group 0 and group 2 to H.
    assert promoted == [
        (R, L4, R),
        (L4, L4, R),
        (L4, H, R),
        (L4, H, L4),
        (H, H, L4),
        (H, H, H),
    ]
    lookup = TokenLookup(packed(TABLE, TAU, 5, "round_robin"), {})
    demoted = [lookup.decide("a", budget / 48, False)[0] for budget in (48, 37, 26, 21, 10, 9)]
    assert demoted == [*promoted[:0:-1], (R, L4, R)]


def literal(
    side: SidePolicy, gamma: float, name: str, remaining: Fraction, critical: bool
) -> tuple[Level, ...]:
    """Algorithm 2 step by step, in fractions, without a table made beforehand."""
    groups, actions = side.evidence.groups, side.evidence.ladder.actions
    distortion = {
        one.bucket.group: one.distortion for one in side.evidence.buckets if one.bucket.name == name
    }

    def price(a: Level, c: int) -> Fraction:
        return Fraction((a + (0 < a < 16)) * groups[c], 16 * sum(groups))

    def rho(c: int, a: Level, b: Level) -> Fraction:
        gain = max(Fraction(0), Fraction(distortion[c][a]) - Fraction(distortion[c][b]))
        return gain / (price(b, c) - price(a, c))

    def total(levels: list[Level]) -> Fraction:
        return sum((price(a, c) for c, a in enumerate(levels)), Fraction(0))

    floors = {q.group: a for q, a in side.floors.items() if q.name == name}
    table = {q.group: a for q, a in side.table.items() if q.name == name}
    levels = [max(table[c], floors[c]) for c in range(len(groups))]
    budget = max(Fraction(0), remaining - Fraction(gamma))
    while total(levels) > budget:
        options = []
        for c, a in enumerate(levels):
            if a > floors[c]:
                lower = max(b for b in actions if b < a)
                options.append((rho(c, lower, a), price(lower, c) - price(a, c), -c, lower))
        if not options:
            break
        _, _, c, lower = min(options)
        levels[-c] = lower
    while critical:
        options = []
        for c, a in enumerate(levels):
            if a < H:
                upper = min(b for b in actions if b > a)
                extra = price(upper, c) - price(a, c)
                if total(levels) + extra <= budget:
                    options.append((-rho(c, a, upper), extra, c, upper))
        if not options:
            break
        _, _, c, upper = min(options)
        levels[c] = upper
    return tuple(levels)


@given(evidences(), taus(), st.integers(0, 40), st.integers(-2, 60), st.booleans())
def test_decisions_are_the_literal_ones(
    of: Evidence, tau: Thresholds, steps: int, units: int, critical: bool
) -> None:
    side = packed(of, tau, steps)
    lookup = TokenLookup(side, {"a": 0.25})
    remaining = units / 32  # whole in binary, so the budget is exact
    for name in {q.name for q in side.floors}:
        gamma = 0.25 if name == "a" else 0.0
        expected = literal(side, gamma, name, Fraction(units, 32), critical)
        assert lookup.decide(name, remaining, critical)[0] == expected


@given(
    evidences(),
    taus(),
    st.integers(0, 40),
    st.floats(-0.5, 1.5),
    st.sampled_from(["distortion", "round_robin"]),
)
def test_floors_and_budget_hold_and_only_critical_states_are_promoted(
    of: Evidence, tau: Thresholds, steps: int, remaining: float, ranking: str
) -> None:
    side = packed(of, tau, steps, ranking)
    lookup = TokenLookup(side, {"a": 0.25})
    for name in {q.name for q in side.floors}:
        budget = max(0.0, remaining - (0.25 if name == "a" else 0.0))
        floors = [a for q, a in sorted(side.floors.items()) if q.name == name]
        table = [a for q, a in sorted(side.table.items()) if q.name == name]
        plain, paid = lookup.decide(name, remaining, False)
        promoted, more = lookup.decide(name, remaining, True)
        for levels, cost in ((plain, paid), (promoted, more)):
            assert all(a >= least for a, least in zip(levels, floors, strict=True))
            assert cost <= budget or list(levels) == floors
        assert all(a <= selected for a, selected in zip(plain, table, strict=True))
        assert all(a <= b for a, b in zip(plain, promoted, strict=True))
        assert lookup.decide(name, remaining, False) == (plain, paid)  # nothing is remembered
