"""The actions a in {R, L, H} that a policy chooses among, and m(a, c), what each costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pask.errors import PaskError, known_names
from pask.methods.levels import Level

# Channels that share a scale and a zero where keys and values are stored low. It is
# `kernels.paged.GROUP`, not imported because it comes with torch.
CHANNELS = 32
SCALE_AND_ZERO_BITS = 2 * 16

_SHORT = {level: f"L{level.value}" for level in Level if level.is_low} | {
    Level.RELEASE: "R",
    Level.HIGH: "H",
}
_NAMED = {name: level for level, name in _SHORT.items()} | {"L": Level.LOW4}


def short(level: Level) -> str:
    """R, L2, L3, L4, L8 or H: how files and tables write a level."""
    return _SHORT[level]


def level_named(text: str) -> Level:
    """The level that `short` writes so; L is the paper's, L4. PaskError for another text."""
    if text not in _NAMED:
        names = sorted(_SHORT.values(), key=lambda name: _NAMED[name])
        raise PaskError(f"unknown level {text!r}", todo=known_names(text, names))
    return _NAMED[text]


@dataclass(frozen=True)
class Ladder:
    """The levels a policy may choose, ascending from RELEASE to HIGH; the paper's is R, L4, H.

    ValueError for levels that do not begin with RELEASE, rise, and end with HIGH.
    """

    actions: tuple[Level, ...] = (Level.RELEASE, Level.LOW4, Level.HIGH)

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in itertools.pairwise(self.actions))
        if not rises or self.actions[:1] + self.actions[-1:] != (Level.RELEASE, Level.HIGH):
            raise ValueError(f"ladder {self}: it has to begin with R, rise, and end with H")

    @classmethod
    def parse(cls, text: str) -> Ladder:
        """From its levels with commas between, such as `R,L4,H`; PaskError for no ladder."""
        try:
            return cls(tuple(level_named(name.strip()) for name in text.split(",")))
        except (ValueError, PaskError) as error:
            raise PaskError(
                f"no ladder of levels: {text!r}",
                why=str(error),
                todo="give levels from R to H, rising, e.g. R,L4,H",
            ) from error

    def __str__(self) -> str:
        return ",".join(short(level) for level in self.actions)

    @property
    def upgrades(self) -> tuple[tuple[Level, Level], ...]:
        """Each level but HIGH with the one above it, ascending: the adjacent upgrades."""
        return tuple(itertools.pairwise(self.actions))

    def above(self, level: Level) -> Level:
        """The next level; ValueError for HIGH and for a level that is not on the ladder."""
        if level is Level.HIGH:
            raise ValueError("there is no level above H")
        return self.actions[self.actions.index(level) + 1]


def stored_bits(level: Level) -> int:
    """Bits that one number of a key or value takes, its share of a scale and a zero included."""
    return level.value + SCALE_AND_ZERO_BITS // CHANNELS if level.is_low else level.value


def level_cost(level: Level) -> float:
    """The share of a 16-bit token's bytes: 0 for RELEASE, 0.3125 for LOW4, 1 for HIGH.

    What belongs to no single token (a prompt's key statistics, partly filled pages) is left out.
    """
    return stored_bits(level) / stored_bits(Level.HIGH)


def m(level: Level, layers_in_group: int, layers: int) -> float:
    """m(a, c) of Equation 1, in units of one token at HIGH in all `layers`.

    It is an integer divided once, so equal costs are equal floats.
    """
    return stored_bits(level) * layers_in_group / (stored_bits(Level.HIGH) * layers)


def token_bits(levels: Iterable[Level], groups: Sequence[int]) -> int:
    """Bits of one number in every layer: a token with one level for each group.

    `groups`: layers in each group. ValueError for levels too many or few.
    """
    return sum(stored_bits(level) * size for level, size in zip(levels, groups, strict=True))


def token_cost(levels: Iterable[Level], groups: Sequence[int]) -> float:
    """The sum over layer groups of m(a, c), divided once as well."""
    return token_bits(levels, groups) / (stored_bits(Level.HIGH) * sum(groups))
