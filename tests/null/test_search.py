"""The search for a knob: what it finds, and what it costs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.evaluation.search import MOST, search


def test_a_straight_line_is_met_in_a_few_measurements() -> None:
    found = search(
        lambda x: 0.02 + 0.9 * x, start=0.33, bounds=(0.0, 1.0), target=0.33, close=0.001
    )
    knob, value = found.best
    assert abs(value - 0.33) <= 0.001
    assert abs(knob - 0.31 / 0.9) <= 0.0012
    assert len(found.tried) <= 3


def test_a_knob_of_other_units() -> None:
    found = search(
        lambda bits: (bits + 1) / 16, start=2.0, bounds=(2.0, 4.0), target=0.25, close=0.001
    )
    assert found.best[0] == pytest.approx(3.0, abs=0.016)


@pytest.mark.parametrize(("target", "knob"), [(0.05, 0.0), (0.9, 1.0)])
def test_a_target_outside_ends_at_the_bound(target: float, knob: float) -> None:
    found = search(
        lambda x: 0.1 + 0.5 * x, start=0.5, bounds=(0.0, 1.0), target=target, close=0.001
    )
    assert found.best == (knob, pytest.approx(0.1 + 0.5 * knob))
    assert len(found.tried) < MOST


def test_a_gap_around_the_target_ends_at_its_nearer_side() -> None:
    found = search(
        lambda x: 0.30 if x < 0.437 else 0.37, start=0.33, bounds=(0.0, 1.0), target=0.33,
        close=0.001,
    )  # fmt: skip
    assert found.best[1] == 0.30
    assert len(found.tried) <= MOST


def test_what_is_returned_was_measured_at_exactly_that_knob() -> None:
    seen = {}

    def measure(x: float) -> float:
        seen[x] = x**3
        return seen[x]

    found = search(measure, start=0.9, bounds=(0.0, 1.0), target=1 / 3, close=1e-4)
    assert dict(found.tried) == seen
    assert list(found.tried) == list(seen.items())
    assert all(round(knob, 6) == knob for knob in seen)


@given(
    steps=st.integers(10, 2000),
    bend=st.floats(0.3, 3.0),
    floor=st.floats(0.0, 0.1),
    target=st.floats(0.12, 0.9),
    start=st.floats(0.0, 1.0),
)
def test_a_rising_staircase_is_met_to_its_step(
    steps: int, bend: float, floor: float, target: float, start: float
) -> None:
    """A method's bytes come in whole tokens and pages."""

    def measure(x: float) -> float:
        return floor + (1 - floor) * math.floor(x**bend * steps) / steps

    found = search(measure, start=start, bounds=(0.0, 1.0), target=target, close=0.001)
    assert len(found.tried) <= MOST
    assert abs(found.best[1] - target) <= 1 / steps + 0.005
