"""V and its interval, and what evidence has to be."""

from __future__ import annotations

import json
from math import log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.policy.actions import Ladder
from pask.policy.evidence import BucketEvidence, Evidence, Failures
from pask.structure.buckets import LayerBucket
from tests.null.policy_tables import L4, L8, H, R, evidence, found

Z2 = 1.959963984540054**2


def test_v_is_the_difference_of_paired_failure_rates() -> None:
    assert Failures(rows=200, lost=5, gained=2, touched=40).v == 0.015
    assert Failures(rows=200, lost=1, gained=3, touched=40).v == -0.01


def test_the_interval_of_no_discordant_rows_is_closed_form() -> None:
    # T^2 = n d / (1 - d) on either side, so d = z^2 / (n + z^2) = 3.8415 / 103.8415.
    low, high = Failures(100, 0, 0, 0).interval()
    assert (low, high) == pytest.approx((-0.036994, 0.036994), abs=1e-6)


@given(st.integers(1, 300), st.data())
def test_without_gained_rows_the_upper_end_is_wilsons(rows: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, rows))
    share = lost / rows
    half = sqrt(Z2) / (1 + Z2 / rows) * sqrt(share * (1 - share) / rows + Z2 / (4 * rows**2))
    wilson = (share + Z2 / (2 * rows)) / (1 + Z2 / rows) + half
    assert Failures(rows, lost, 0, lost).interval()[1] == pytest.approx(wilson, abs=1e-9)
    mirrored = Failures(rows, 0, lost, lost).interval()[0]
    assert mirrored == pytest.approx(-wilson, abs=1e-9)


def _score(f: Failures, d: float) -> float:
    """The score statistic with the nuisance share found by search, not from its quadratic."""

    def loss(gained: float) -> float:
        shares = (gained + d, gained, 1 - 2 * gained - d)
        counts = (f.lost, f.gained, f.rows - f.lost - f.gained)
        return -sum(k * log(max(p, 1e-300)) for k, p in zip(counts, shares, strict=True) if k)

    low, high = max(0.0, -d), (1 - d) / 2
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    gained = (low + high) / 2
    return (f.lost - f.gained - f.rows * d) / sqrt(f.rows * (2 * gained + d - d * d))


@pytest.mark.parametrize(
    "counts", [(50, 5, 2), (200, 12, 12), (44, 1, 3), (600, 40, 11), (30, 20, 1), (1000, 2, 1)]
)
def test_both_ends_are_where_the_score_test_begins_to_reject(
    counts: tuple[int, int, int],
) -> None:
    rows, lost, gained = counts
    failures = Failures(rows, lost, gained, rows)
    low, high = failures.interval()
    assert -1 < low < failures.v < high < 1
    assert _score(failures, low) == pytest.approx(sqrt(Z2), abs=1e-4)
    assert _score(failures, high) == pytest.approx(-sqrt(Z2), abs=1e-4)


def test_a_wider_level_gives_a_wider_interval_that_ends_at_certainty() -> None:
    failures = Failures(20, 20, 0, 20)
    assert failures.interval()[1] == 1.0
    assert failures.interval(0.99)[0] < failures.interval(0.95)[0] < 1.0


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (9, -1, 0, 3), (9, 2, 2, 3), (9, 1, 1, 10)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="failures: "):
        Failures(*counts)


def test_evidence_comes_back_from_json_as_it_was() -> None:
    of = evidence(
        found("a/free", 0, {R: 2.5, L4: 0.125}, {R: 3}, tokens=4.5),
        found("a/free", 1, {R: 1 / 3, L4: 0.0}),
        groups=(10, 20),
    )
    assert Evidence.from_json(json.loads(json.dumps(of.to_json()))) == of


def test_evidence_has_each_bucket_once_with_every_level_of_its_ladder() -> None:
    good = found("a", 0, {R: 1.0, L4: 0.5})
    with pytest.raises(ValueError, match="twice"):
        evidence(good, good)
    with pytest.raises(ValueError, match="no such layer group"):
        evidence(found("a", 1, {R: 1.0, L4: 0.5}))
    for ladder in ("R,H", "R,L4,L8,H"):
        with pytest.raises(ValueError, match=f"not the levels {ladder}"):
            evidence(good, ladder=Ladder.parse(ladder))
    with pytest.raises(ValueError, match="not the levels"):
        evidence(found("a", 0, {R: 1.0, L8: 0.5}))
    with pytest.raises(ValueError, match="unknown side 'prefill'"):
        Evidence("prefill", Ladder(), (1,), 200, (good,))


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf")])
def test_distortion_is_a_finite_number_from_zero_up_and_zero_at_high(bad: float) -> None:
    with pytest.raises(ValueError, match="negative or not finite"):
        found("a", 0, {R: 1.0, L4: bad})
    with pytest.raises(ValueError, match="at H has to be 0"):
        BucketEvidence(LayerBucket("a", 0), 1.0, {R: 1.0, H: 0.1}, {}, 3)
