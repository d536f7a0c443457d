"""Statistics against hand-worked numbers, and the properties that make them usable in tables."""

from __future__ import annotations

from itertools import pairwise
from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.report.statistics import holm, mcnemar, paired_difference, rounded, wilson


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (6, 10, "31.3", "83.2"),
        (0, 10, "0.0", "27.8"),
        (10, 10, "72.2", "100.0"),
        (7, 14, "26.8", "73.2"),
        (97, 120, "72.9", "86.9"),
        (528, 600, "85.2", "90.4"),
        (584, 811, "68.8", "75.0"),
    ],
)
def test_wilson_matches_hand_worked_intervals(k: int, n: int, low: str, high: str) -> None:
    ends = wilson(k, n)
    assert (rounded(100 * ends[0], 1), rounded(100 * ends[1], 1)) == (low, high)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_proportion_and_is_symmetric(pair: tuple[int, int]) -> None:
    k, n = pair
    low, high = wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1
    assert high > low
    mirrored = wilson(n - k, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_wilson_level_widens_the_interval() -> None:
    assert wilson(50, 100, 0.99)[0] < wilson(50, 100, 0.95)[0] < wilson(50, 100, 0.5)[0]


@pytest.mark.parametrize(("k", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_proportion(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        wilson(k, n)


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [
        (0, 0, 1.0),
        (5, 0, 0.0625),
        (6, 0, 0.03125),
        (8, 0, 0.0078125),
        (0, 6, 0.03125),
        (3, 3, 1.0),
        (1, 9, 2 * 11 / 1024),
        (2, 8, 2 * 56 / 1024),
    ],
)
def test_mcnemar_exact(lost: int, gained: int, p: float) -> None:
    first = [1] * lost + [0] * gained + [1, 0]
    second = [0] * lost + [1] * gained + [1, 0]
    test = mcnemar(first, second)
    assert (test.b, test.c, test.p) == (lost, gained, p)


def test_mcnemar_handles_more_flips_than_a_float_can_count() -> None:
    test = mcnemar([1] * 1500, [0] * 1500)
    assert test.b == 1500
    assert 0 <= test.p < 1e-300


def test_identical_vectors_differ_by_exactly_nothing() -> None:
    answers = [1, 0, 1, 1, 0, 1]
    difference = paired_difference(answers, answers, list("aabbcc"))
    assert (difference.estimate, difference.low, difference.high) == (0.0, 0.0, 0.0)
    assert mcnemar(answers, answers).p == 1.0


def test_bootstrap_matches_the_exact_distribution_of_two_clusters() -> None:
    # Two clusters with gains +1 and 0 out of 1 item each: draws are 0, .5, 1 with 1/4, 1/2, 1/4.
    difference = paired_difference([1, 0], [0, 0], ["a", "b"], level=0.5)
    assert difference.estimate == 0.5
    assert difference.clusters == 2
    assert difference.low in (0.0, 0.5)
    assert difference.high in (0.5, 1.0)
    wide = paired_difference([1, 0], [0, 0], ["a", "b"], level=0.9)
    assert (wide.low, wide.high) == (0.0, 1.0)


def test_clusters_widen_the_interval() -> None:
    rng = np.random.default_rng(3)
    per_cluster = rng.integers(0, 2, 40)
    first, second = np.repeat(per_cluster, 10), np.zeros(400, dtype=int)
    single = paired_difference(first, second, [str(i) for i in range(400)])
    grouped = paired_difference(first, second, [str(i // 10) for i in range(400)])
    assert single.estimate == grouped.estimate
    ratio = (grouped.high - grouped.low) / (single.high - single.low)
    assert ratio == pytest.approx(10**0.5, rel=0.1)  # 10 perfectly correlated items a cluster


def test_bootstrap_agrees_with_the_normal_approximation_where_that_is_good() -> None:
    first, second = np.array([1] * 300 + [0] * 700), np.array([0] * 200 + [1] * 100 + [0] * 700)
    difference = paired_difference(first, second, [str(i) for i in range(1000)])
    assert difference.estimate == 0.2
    error = np.std(first - second) / 1000**0.5
    assert difference.low == pytest.approx(0.2 - 1.96 * error, abs=0.003)
    assert difference.high == pytest.approx(0.2 + 1.96 * error, abs=0.003)


def test_bootstrap_depends_on_the_seed_and_not_on_the_order() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 2, 97), rng.integers(0, 2, 97)
    clusters = np.array([f"c{i % 31}" for i in range(97)])
    once = paired_difference(first, second, clusters, seed=7)
    assert once == paired_difference(first, second, clusters, seed=7)
    order = rng.permutation(97)
    assert once == paired_difference(first[order], second[order], clusters[order], seed=7)
    other = paired_difference(first, second, clusters, seed=8, resamples=999)
    assert (other.low, other.high) != (once.low, once.high)
    swapped = paired_difference(second, first, clusters, seed=7)
    assert swapped.low == pytest.approx(-once.high, abs=1e-12)


def test_one_cluster_has_no_interval() -> None:
    difference = paired_difference([1, 1], [0, 1], ["a", "a"])
    assert difference.estimate == 0.5
    assert isnan(difference.low)
    assert isnan(difference.high)


@pytest.mark.parametrize(("first", "second"), [([], []), ([1], [1, 0]), ([2], [1])])
def test_unpaired_vectors_are_refused(first: list[int], second: list[int]) -> None:
    with pytest.raises(ValueError, match="paired vectors"):
        mcnemar(first, second)


def test_holm_on_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_keeps_the_order_and_lies_between_raw_and_bonferroni(p: list[float]) -> None:
    adjusted = holm(p)
    for raw, new in zip(p, adjusted, strict=True):
        assert raw <= new <= min(1.0, max(len(p) * other for other in p if other <= raw))
    order = sorted(range(len(p)), key=lambda i: p[i])
    assert all(adjusted[i] <= adjusted[j] for i, j in pairwise(order))


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (100 * 1 / 800, 2, "0.13"),  # 0.125: half up, where banker's rounding gives 0.12
        (100 * 67 / 20000, 2, "0.34"),  # 0.335, which binary stores below the half
        (2.5, 0, "3"),
        (-2.5, 0, "-3"),
        (-0.001, 2, "0.00"),
        (100 * 551 / 600, 2, "91.83"),
        (1e-7, 3, "0.000"),
    ],
)
def test_rounding_is_half_up_from_the_decimal_value(value: float, digits: int, text: str) -> None:
    assert rounded(value, digits) == text
