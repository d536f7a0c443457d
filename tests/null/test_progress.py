"""The progress line: counts, speed without what was there before, and a pulse."""

import time

import pytest

from pask.progress import Progress


def test_the_line_tells_items_rate_and_detail() -> None:
    progress = Progress("evaluate x", total=10, done=4)
    progress.advance(detail="full 1/1 right")
    line = progress.line()
    assert line.startswith("evaluate x: 5/10 items, 4 from before, ")
    assert "items/s, ETA " in line
    assert line.endswith("full 1/1 right")


def test_a_slow_item_does_not_silence_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress("slow", total=1, interval=0.01):
        time.sleep(0.2)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) >= 4  # first, last and several of the pulse
    assert all(line.startswith("slow: 0/1 items") for line in lines)


def test_nothing_left_is_not_a_division_by_zero() -> None:
    assert "3/3 items" in Progress("x", total=3, done=3).line()
