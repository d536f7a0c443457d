"""Where decoded tokens that do not end at HIGH have gone, as counts over time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pask.methods.levels import Level


class Trails:
    """Running counts of all seats, by decoded token and layer.

    `waiting[seat, t, layer]`: how many of the first t decoded tokens do not end at HIGH; token t
    took that slot of the ring (before wrapping) where it is one of them. `low[level][seat, t,
    layer]`: how many of them end at a low level; token t goes to that slot behind the prompt's.
    Both follow from the tokens' levels alone, so a step that is done twice writes the same slots.
    Entries mean something up to the seat's number of decoded tokens, and 0 holds 0.
    """

    def __init__(self, seats: int, layers: int, levels: Iterable[Level]) -> None:
        size = (seats, 64, layers)
        self.waiting = np.zeros(size, dtype=np.int32)
        self.low = {level: np.zeros(size, dtype=np.int32) for level in levels if level.is_low}

    def write(
        self, seats: np.ndarray, tokens: np.ndarray, starts: np.ndarray, levels: np.ndarray
    ) -> None:
        """Say where tokens end: row r is decoded token tokens[r] of seats[r], levels[r] [layers].

        A sequence's rows follow each other; `starts[r]` is the row that its first one is.
        """
        self._fit(int(tokens.max()) + 1)
        self._count(self.waiting, seats, tokens, starts, levels != Level.HIGH)
        for level, counts in self.low.items():
            self._count(counts, seats, tokens, starts, levels == level)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Give a seat the first tokens' counts of another."""
        for counts in (self.waiting, *self.low.values()):
            counts[target, : tokens + 1] = counts[source, : tokens + 1]

    def _count(
        self,
        counts: np.ndarray,
        seats: np.ndarray,
        tokens: np.ndarray,
        starts: np.ndarray,
        more: np.ndarray,
    ) -> None:
        total = np.cumsum(more, axis=0, dtype=np.int32)
        before = counts[seats, tokens[starts]] - (total[starts] - more[starts])
        counts[seats, tokens + 1] = before + total

    def _fit(self, tokens: int) -> None:
        have = self.waiting.shape[1]
        if tokens < have:
            return
        self.waiting = _longer(self.waiting, max(tokens + 1, 2 * have))
        self.low = {
            level: _longer(counts, max(tokens + 1, 2 * have)) for level, counts in self.low.items()
        }


def _longer(counts: np.ndarray, length: int) -> np.ndarray:
    grown = np.zeros((counts.shape[0], length, counts.shape[2]), dtype=counts.dtype)
    grown[:, : counts.shape[1]] = counts
    return grown
