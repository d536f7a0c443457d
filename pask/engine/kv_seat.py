"""A sequence's place in the KV store, and where its decoded tokens have gone so far."""

from __future__ import annotations

from dataclasses import dataclass

from pask.methods.contract import SlotChoice
from pask.methods.levels import CHANNEL_GROUP, LOW_LEVELS, Level


@dataclass(frozen=True)
class KVShape:
    """What of a model the store has to know."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def heads(self) -> int:
        """Kv heads of all layers together."""
        return self.layers * self.kv_heads


@dataclass(eq=False)
class Seat:
    """A sequence in the store; only the store changes it.

    `recent`: a decoded token that does not end at HIGH stays in 16 bit until so many later ones
    were fed. `levels`: the low levels that its tokens may have. `normalise`: low keys are stored
    freed of the prompt's channel statistics. `ring_slots`: the room of recent tokens, per layer and
    kv head. `longest_run`: rows of one run that are sure to fit. `acts`: decoded tokens may end
    below HIGH. `channel_keys`: keys at LOW2 are quantised by channel.
    """

    id: int
    prompt_tokens: int
    recent: int
    levels: frozenset[Level]
    normalise: bool
    ring_slots: int
    longest_run: int
    acts: bool
    choice: SlotChoice | None
    channel_keys: bool = False
    decoded: int = 0
    cut_from: int = 0  # decoded tokens when something was last evicted: no cut goes behind that
    layers_placed: int = 0
    shares: bool = False  # some of its pages may be held by another seat too
    owns_tails: bool = True  # the pages that the next tokens go into are its own
    evicted: bool = False

    @property
    def position(self) -> int:
        """Logical position of the next token, whatever is resident."""
        return self.prompt_tokens + self.decoded

    @property
    def has_statistics(self) -> bool:
        return self.normalise and bool(self.levels)

    @property
    def left(self) -> int:
        """Decoded tokens that have left the recent window: what the last fed does not see there."""
        return max(self.decoded - 1 - self.recent, 0)

    @property
    def decoded_levels(self) -> frozenset[Level]:
        """The low levels at which decoded tokens may end."""
        return self.levels - {Level.LOW2} if self.channel_keys else self.levels

    def kind(self, level: Level) -> str:
        """The kind of region that its prompt's tokens of a level are in."""
        if level is Level.LOW2 and self.channel_keys:
            return CHANNEL2
        return "high" if level is Level.HIGH else low_kind(level)


CHANNEL2 = "channel2"
"""The kind of region with LOW2 tokens whose keys are quantised by channel, and its pool's name."""

Pool = Level | str
"""What a pool of pages is called: its level, or CHANNEL2, whose pages are of another make."""


def low_kind(level: Level) -> str:
    """The kind of region with a low level's tokens, each quantised by itself."""
    return f"low{int(level)}"


def pool_slots(pool: Pool, page_slots: int) -> int:
    """Slots of a pool's pages in a store with pages of `page_slots`."""
    return CHANNEL_GROUP if pool == CHANNEL2 else page_slots


LOW_KINDS = {low_kind(level): level for level in reversed(LOW_LEVELS)}
"""The kinds of low region, widest first."""

KIND_POOL: dict[str, Pool] = {
    "high": Level.HIGH,
    **LOW_KINDS,
    CHANNEL2: CHANNEL2,
    "recent": Level.HIGH,
    "summary": Level.HIGH,
}
"""Whose pages a kind of region lies in. Attention reads regions in this order."""

FILLED_KINDS = ("high", *LOW_KINDS, CHANNEL2)
"""The kinds of region that are filled from slot 0 on."""
