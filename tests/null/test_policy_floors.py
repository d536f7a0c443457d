"""The envelope of Equation 5 and the floors of Equation 6, by hand and against their cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.policy.envelope import envelope
from pask.policy.floors import Thresholds, floor, floors, no_floors
from pask.structure.buckets import LayerBucket
from tests.null.policy_tables import L2, L4, L8, PAPER, H, R, evidence, found

LONG = Ladder((R, L2, L4, L8, H))
TAU = Thresholds(0.005, 0.01)


@pytest.mark.parametrize(
    ("v", "bars"),
    [
        ({R: 0.30, L4: 0.10}, {R: 0.30, L4: 0.10, H: 0.0}),
        ({R: 0.10, L4: 0.30}, {R: 0.30, L4: 0.30, H: 0.0}),  # an inversion
        ({R: 0.10, L4: -0.20}, {R: 0.10, L4: 0.0, H: 0.0}),  # better than the reference
        ({R: -0.10, L4: -0.20}, {R: 0.0, L4: 0.0, H: 0.0}),
        ({H: 0.5, L4: 0.1, R: 0.2}, {R: 0.2, L4: 0.1, H: 0.0}),  # H is 0 by definition
        (
            {R: 0.25, L2: 0.40, L4: -0.10, L8: 0.05},
            {R: 0.40, L2: 0.40, L4: 0.05, L8: 0.05, H: 0.0},
        ),
    ],
)
def test_the_envelope_by_hand(v: dict[Level, float], bars: dict[Level, float]) -> None:
    assert envelope(v) == bars
    assert list(envelope(v)) == sorted(bars)


@given(st.dictionaries(st.sampled_from([R, L2, L4, L8]), st.floats(-1, 1), min_size=1))
def test_an_envelope_falls_along_the_ladder_and_is_the_least_that_covers(
    v: dict[Level, float],
) -> None:
    bars = envelope(v)
    values = list(bars.values())
    assert values == sorted(values, reverse=True)
    for level in v:
        assert bars[level] == max(0.0, *(v[other] for other in v if other >= level))


@pytest.mark.parametrize(
    ("v_r", "v_l", "least"),
    [
        (0.0, 0.0, R),
        (0.005, 0.0, R),  # exactly tau.low is allowed
        (0.006, 0.0, L4),
        (0.006, 0.01, L4),  # exactly tau.high is allowed
        (0.0, 0.008, L4),  # R fails as often as L in the envelope
        (0.0, 0.011, H),
        (0.5, 0.011, H),
        (0.5, 0.004, L4),
    ],
)
def test_floors_of_the_papers_ladder_by_hand(v_r: float, v_l: float, least: Level) -> None:
    assert floor(envelope({R: v_r, L4: v_l}), PAPER, TAU) is least


@pytest.mark.parametrize(
    ("v", "least"),
    [
        ({R: 0.0, L2: 0.0, L4: 0.0, L8: 0.0}, R),
        ({R: 0.9, L2: 0.005, L4: 0.0, L8: 0.0}, L2),
        ({R: 0.9, L2: 0.006, L4: 0.005, L8: 0.0}, L4),
        ({R: 0.9, L2: 0.006, L4: 0.006, L8: 0.0}, L8),
        ({R: 0.9, L2: 0.01, L4: 0.01, L8: 0.01}, L8),  # the last step is judged by tau.high
        ({R: 0.0, L2: 0.0, L4: 0.0, L8: 0.02}, H),
    ],
)
def test_floors_of_a_longer_ladder_by_hand(v: dict[Level, float], least: Level) -> None:
    assert floor(envelope(v), LONG, TAU) is least


def test_a_ladder_without_low_levels_has_the_second_step_only() -> None:
    ladder = Ladder((R, H))
    assert floor({R: 0.01, H: 0.0}, ladder, TAU) is R
    assert floor({R: 0.011, H: 0.0}, ladder, TAU) is H


STEPS = st.integers(-4, 8).map(lambda k: k * 0.0025)


@given(STEPS, STEPS, st.tuples(STEPS, STEPS).map(lambda t: sorted(max(0.0, x) for x in t)))
def test_equation_6_as_the_paper_writes_it(v_r: float, v_l: float, tau: list[float]) -> None:
    low, high = tau
    bar_l = max(0.0, v_l)
    bar_r = max(bar_l, v_r)
    expected = H if bar_l > high else L4 if bar_r > low else R
    assert floor(envelope({R: v_r, L4: v_l}), PAPER, Thresholds(low, high)) is expected


def test_floors_of_all_buckets_come_from_their_failures() -> None:
    of = evidence(
        found("a", 0, {R: 1.0, L4: 0.1}, {R: 1}),  # 1 of 200 is exactly 0.005
        found("b", 0, {R: 1.0, L4: 0.1}, {R: 2}),
        found("b", 1, {R: 1.0, L4: 0.1}, {R: 0, L4: 3}),
        groups=(2, 1),
    )
    a, b0, b1 = LayerBucket("a", 0), LayerBucket("b", 0), LayerBucket("b", 1)
    assert floors(of, TAU) == {a: R, b0: L4, b1: H}
    assert floors(of, Thresholds(0.02, 0.02)) == {a: R, b0: R, b1: R}
    assert no_floors(of) == {a: R, b0: R, b1: R}


@pytest.mark.parametrize("pair", [(-0.1, 0.1), (0.2, 0.1), (float("nan"), 0.1)])
def test_thresholds_are_ordered(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="thresholds: "):
        Thresholds(*pair)
