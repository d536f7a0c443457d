"""Gamma, the budget that is kept back (Equation 9)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.methods.levels import Level
from pask.policy.reserve import quantile, reserve
from pask.structure.buckets import LayerBucket
from tests.null.policy_tables import L4, H, R

# Groups of 1 and 3 layers, costs at the floors in 64ths: a 16, b 0.3125 * 48 = 15, c nothing.
FLOORS = {
    LayerBucket("a", 0): H,
    LayerBucket("a", 1): R,
    LayerBucket("b", 0): R,
    LayerBucket("b", 1): L4,
    LayerBucket("c", 0): R,
    LayerBucket("c", 1): R,
}
TRACES = [["a", "b", "a", "c"], ["b", "b", "a"], ["c", "a"]]
# What follows: a: 31, 0 | 0 | 0; b: 16 | 31, 16; c: 0 | 16.


@pytest.mark.parametrize(
    ("beta", "a", "b", "c"),
    [
        (0.0, 0, 16, 0),
        (0.5, 0, 16, 0),
        (0.66, 0, 16, 16),  # two of three b's are 16, one of two c's is 0
        (0.75, 0, 31, 16),
        (0.76, 31, 31, 16),
        (1.0, 31, 31, 16),
    ],
)
def test_the_reserve_by_hand(beta: float, a: int, b: int, c: int) -> None:
    expected = {"a": a / 64, "b": b / 64, "c": c / 64}
    assert reserve(TRACES, FLOORS, (1, 3), beta) == expected


def test_tokens_that_were_never_judged_are_reserved_whole() -> None:
    assert reserve([["c", "new", "c"]], FLOORS, (1, 3), 1.0) == {"c": 1.0, "new": 0.0}
    assert reserve([[], []], FLOORS, (1, 3), 0.5) == {}


def test_a_quantile_is_an_observed_value() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.51) == 3.0
    assert quantile([7.0], 0.0) == quantile([7.0], 1.0) == 7.0
    assert quantile([float(k) for k in range(1, 101)], 0.55) == 55.0  # 0.55 * 100 > 55 in binary


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 100))
def test_a_quantile_is_the_least_value_that_covers_the_share(
    values: list[int], percent: int
) -> None:
    share = Fraction(percent, 100)
    covering = [
        v for v in values if Fraction(sum(other <= v for other in values), len(values)) >= share
    ]
    assert quantile(values, percent / 100) == min(covering)


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_beta_is_a_share(beta: float) -> None:
    with pytest.raises(ValueError, match="reserve: beta"):
        reserve(TRACES, FLOORS, (1, 3), beta)


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=6), max_size=5), st.floats(0, 1))
def test_no_state_reserves_more_than_the_rest_of_its_longest_answer(
    traces: list[list[str]], beta: float
) -> None:
    levels: dict[str, tuple[Level, Level]] = {"a": (H, R), "b": (R, L4), "c": (R, R)}
    costs = {name: (x.value + 3 * (5 if y is L4 else 0)) / 64 for name, (x, y) in levels.items()}
    found = reserve(traces, FLOORS, (1, 3), beta)
    assert set(found) == {name for trace in traces for name in trace}
    for name, kept in found.items():
        seen = [
            sum(costs[later] for later in trace[at + 1 :])
            for trace in traces
            for at, here in enumerate(trace)
            if here == name
        ]
        assert kept in seen
