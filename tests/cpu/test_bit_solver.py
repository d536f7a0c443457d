"""The knapsacks against brute force and worked examples."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pask.methods.bit_solver import (
    best_subset,
    by_rate,
    convex_steps,
    full_slots,
    held_slots,
)
from pask.methods.contract import PromptInfo
from pask.methods.levels import Level

ITEMS = st.lists(st.tuples(st.integers(-3, 20), st.integers(1, 9)), min_size=1, max_size=9)


@given(items=ITEMS, capacity=st.integers(0, 60))
def test_no_other_subset_gains_more_or_weighs_less(
    items: list[tuple[int, int]], capacity: int
) -> None:
    gains, weights = [float(gain) for gain, _ in items], [weight for _, weight in items]
    taken = best_subset(gains, weights, capacity)
    all_subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(items)), size) for size in range(len(items) + 1)
    )
    found = [
        (-sum(gains[i] for i in subset), sum(weights[i] for i in subset))
        for subset in all_subsets
        if sum(weights[i] for i in subset) <= capacity
    ]
    assert (-sum(gains[i] for i in taken), sum(weights[i] for i in taken)) == min(found)


def test_a_worked_knapsack() -> None:
    # By gain per weight the first item (2.0) would come first, and nothing fits beside it.
    assert best_subset([8.0, 6.0, 5.0], [4, 4, 3], 7) == {0, 2}
    assert best_subset([8.0, 7.0, 7.0], [4, 4, 4], 8) == {0, 1}  # of two equals the earlier
    assert best_subset([8.0, 6.0, 6.0], [4, 3, 3], 6) == {1, 2}
    assert best_subset([1.0, -1.0, 0.0], [1, 1, 1], 3) == {0}
    assert best_subset([1.0], [2], 1) == frozenset()
    assert best_subset([1.0], [2], -0.5) == frozenset()


def test_beyond_22_items_it_is_greedy_and_passes_over_what_does_not_fit() -> None:
    gains = [30.0, 29.0, 1.0] + [0.5] * 20
    weights = [10, 15, 1] + [100] * 20
    assert best_subset(gains, weights, 20) == {0, 2}
    draw = random.Random(3)
    gains = [draw.uniform(-1, 5) for _ in range(40)]
    weights = [draw.randrange(1, 30) for _ in range(40)]
    taken, left = set(), 150
    for _, item in sorted((-gains[i] / weights[i], i) for i in range(40)):
        if gains[item] > 0 and weights[item] <= left:
            taken.add(item)
            left -= weights[item]
    assert best_subset(gains, weights, 150) == taken
    assert best_subset(gains, weights, 10_000) == {i for i in range(40) if gains[i] > 0}


def test_22_items_are_still_exact() -> None:
    gains = [3.0, 3.0] + [0.0] * 19 + [5.0]
    weights = [2, 2] + [1] * 19 + [3]  # the heaviest has the best rate, two others more together
    assert best_subset(gains, weights, 4) == {0, 1}


def test_by_rate_puts_the_earlier_of_equals_first() -> None:
    assert by_rate([2.0, 9.0, 1.0, -1.0], [2, 3, 1, 1]) == [1, 0, 2, 3]


@pytest.mark.parametrize(("gains", "weights"), [([1.0], [0]), ([1.0], [1, 2])])
def test_refused_items(gains: list[float], weights: list[int]) -> None:
    with pytest.raises(ValueError, match="weight of at least 1"):
        best_subset(gains, weights, 3)


def test_convex_steps_pass_over_a_level_that_mixing_beats() -> None:
    costs = (0.0, 0.25, 1.0)
    assert convex_steps(costs, (8.0, 1.0, 0.0)) == [(0, 1, 28.0), (1, 2, 4 / 3)]
    assert convex_steps(costs, (8.0, 7.0, 0.0)) == [(0, 2, 8.0)]
    assert convex_steps(costs, (8.0, 6.0, 0.0)) == [(0, 1, 8.0), (1, 2, 8.0)]  # on the line
    assert convex_steps(costs, (1.0, 5.0, 0.0)) == [(0, 2, 1.0)]


@given(
    groups=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=3
    )
)
def test_steps_in_order_are_the_best_mixture_at_every_cost(
    groups: list[tuple[int, int, int]],
) -> None:
    """Tokens of a group are alike: brute force over how many of each are at which level."""
    costs, ways = (0, 1, 4), []
    for release, low, count in groups:
        ways.append(
            [
                (at_low + 4 * high, release * (count - at_low - high) + low * at_low)
                for at_low in range(count + 1)
                for high in range(count + 1 - at_low)
            ]
        )
    least: dict[int, int] = {}
    for chosen in itertools.product(*ways):
        cost, loss = (sum(part) for part in zip(*chosen, strict=True))
        least[cost] = min(loss, least.get(cost, loss))
    steps = [
        (-saved, group, b - a, costs[b] - costs[a])
        for group, (release, low, _) in enumerate(groups)
        for a, b, saved in convex_steps(costs, (release, low, 0))
    ]
    cost, loss = 0, float(sum(release * count for release, _, count in groups))
    for saved, group, _, price in sorted(steps):
        for _ in range(groups[group][2]):
            assert loss <= least[cost] + 1e-9
            cost, loss = cost + price, loss + saved * price
    assert loss == pytest.approx(0.0, abs=1e-9)


def test_held_slots_by_hand() -> None:
    info = PromptInfo(20, 2, 1, 1, 32, expected_new_tokens=5, page_slots=16)
    assert full_slots(info) == 32
    low4, high, release = Level.LOW4, Level.HIGH, Level.RELEASE
    before = torch.tensor([release, release, low4, low4])
    after = torch.tensor([low4, low4, high, high])
    # One page of 16 bit for the answer, one at 4 bit as long as a token is there, and the vectors.
    assert held_slots(info, before, after, high).tolist() == [22.0, 22.0, 22.0, 16.0]
    # The answer at 4 bit: a page of it, shared with the prompt's, until tokens are in 16 bit.
    assert held_slots(info, before, after, low4).tolist() == [6.0, 6.0, 22.0, 22.0]
    nothing = PromptInfo(20, 2, 1, 1, 32, page_slots=16)
    assert held_slots(nothing, before, after, low4).tolist() == [6.0, 6.0, 22.0, 17.0]
