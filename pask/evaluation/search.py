"""Finds the value of a knob at which a measured quantity meets a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST = 14
"""Measurements that a search takes at most."""

_DECIMALS = 6  # of a knob's value: what is written down is what was measured


@dataclass(frozen=True)
class Found:
    """All (knob, measured) pairs in the order in which they were tried, and the best of them."""

    tried: tuple[tuple[float, float], ...]
    target: float

    @property
    def best(self) -> tuple[float, float]:
        return min(self.tried, key=lambda pair: abs(pair[1] - self.target))


def search(
    measure: Callable[[float], float],
    *,
    start: float,
    bounds: tuple[float, float],
    target: float,
    close: float,
) -> Found:
    """Look for the knob, within `bounds`, at which `measure` gives `target`.

    `measure` must not fall as the knob grows; it may grow in steps. Ends within `close` of the
    target, at a bound that does not reach it, where two values without one between them have the
    target between them, or after `MOST` measurements.
    """
    low, high = bounds
    tried: list[tuple[float, float]] = []
    below: tuple[float, float] | None = None  # the largest knob measured below the target
    above: tuple[float, float] | None = None
    knob, step = min(max(start, low), high), (high - low) / 16
    while len(tried) < MOST:
        knob = round(knob, _DECIMALS)
        value = measure(knob)
        tried.append((knob, value))
        if abs(value - target) <= close:
            break
        if value < target:
            below = (knob, value)
        else:
            above = (knob, value)
        if below is None or above is None:
            if knob == (low if below is None else high):
                break
            # Towards the target by what a straight line from 0 would say, and a little more.
            step = max(2 * step, abs(value - target) * (high - low) * 1.25)
            knob = max(low, knob - step) if below is None else min(high, knob + step)
            continue
        width = above[0] - below[0]
        if width <= 10**-_DECIMALS:
            break
        share = (target - below[1]) / (above[1] - below[1])
        # Off the ends, so that a step in the measured quantity cannot hold the search up.
        knob = below[0] + width * min(max(share, 0.05), 0.95)
    return Found(tuple(tried), target)
