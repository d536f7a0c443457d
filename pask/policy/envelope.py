"""V-bar of Equation 5: the increase in failures, made monotone in the level."""

from __future__ import annotations

from collections.abc import Mapping

from pask.methods.levels import Level


def envelope(v: Mapping[Level, float]) -> dict[Level, float]:
    """V-bar(q, a) from V(q, a) by action; ascending levels, HIGH with 0.

    Equation 5 for any ladder: from HIGH down, each level has its own V or the V-bar of the level
    above it, whichever is larger. So a level that failed less often than a higher one, by chance
    of few rows, counts as failing as often, and none as failing less often than HIGH. What `v` has
    at HIGH does not matter.
    """
    least, bars = 0.0, {Level.HIGH: 0.0}
    for level in sorted(v, reverse=True):
        if level is not Level.HIGH:
            bars[level] = least = max(least, v[level])
    return dict(sorted(bars.items()))
