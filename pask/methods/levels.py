"""The precisions at which a token's KV may stay, from nothing to 16 bit."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """A token's final level; its value is the bits of a stored number, so that levels compare.

    RELEASE is the paper's R, HIGH its H (16 bit as computed), LOW4 its L; the other widths are
    further choices (section 3.1: R < L < H).
    """

    RELEASE = 0
    LOW2 = 2
    LOW3 = 3
    LOW4 = 4
    LOW8 = 8
    HIGH = 16

    @property
    def is_low(self) -> bool:
        """Whether tokens of this level are kept as quantised codes."""
        return Level.RELEASE < self < Level.HIGH


LOW_LEVELS = tuple(level for level in Level if level.is_low)

CHANNEL_GROUP = 32
"""Tokens that share a scale and a zero per channel where keys are quantised by channel (KIVI)."""
