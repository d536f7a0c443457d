"""What the paged operations read and write: pages by kind, and where a row finds its slots.

A page holds `page_slots` tokens of one kv head of one layer of one sequence: a key and a value
each. All sequences share the pages of a kind; a table says which are whose. Every operation works
on one layer, for all rows of a step at once; a row is one query token of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 32
"""Numbers that share a scale and a zero in quantised pages; head_dim must be a multiple."""

BITS = (2, 3, 4, 8)
"""The code widths that quantised pages may have."""

CHANNEL_BITS = 2
"""The code width of pages whose keys are quantised by channel."""


@dataclass(frozen=True)
class HighPages:
    """Keys and values as they are: [pages, 2 (key, value), page_slots, head_dim], any float."""

    data: torch.Tensor

    @property
    def page_slots(self) -> int:
        return self.data.shape[2]


@dataclass(frozen=True)
class LowPages:
    """Keys and values as `bits`-bit codes, asymmetric in groups of 32 channels of one token.

    codes: [pages, 2, page_slots, head_dim // 8 * bits] uint8; ranges: [pages, 2, page_slots,
    head_dim // 32, 2 (scale, zero)] fp16; a value is code * scale + zero. `reference.pack` defines
    where a channel's code lies.
    """

    codes: torch.Tensor
    ranges: torch.Tensor
    bits: int

    @property
    def page_slots(self) -> int:
        return self.codes.shape[2]


@dataclass(frozen=True)
class ChannelPages:
    """Tokens in groups of 32, keys as 2-bit codes by channel of a group, values by token (KIVI).

    A page is one group: the keys of a channel have a scale and a zero in common (KIVI,
    arXiv:2402.02750, section 3), the values of a token in each 32 channels, as in `LowPages`.

    codes: [pages, 2, 32, head_dim // 4] uint8, packed by token as in `LowPages`; ranges: [pages, 2,
    head_dim, 2 (scale, zero)] fp16, of keys by channel, of values by token and then by group of
    channels: entry token * (head_dim // 32) + group. Raises ValueError for other page sizes.
    """

    codes: torch.Tensor
    ranges: torch.Tensor

    def __post_init__(self) -> None:
        if self.codes.shape[2] != GROUP:
            raise ValueError(f"pages quantised by channel hold {GROUP} tokens")

    @property
    def page_slots(self) -> int:
        return GROUP

    @property
    def bits(self) -> int:
        return CHANNEL_BITS


Pages = HighPages | LowPages | ChannelPages


@dataclass(frozen=True)
class KeyShift:
    """Per-channel statistics that quantised keys were freed of: k = code * spread + center.

    center, spread: [sequences, kv_heads, head_dim] fp16. A sequence whose low keys are stored
    plain has center 0 and spread 1.
    """

    center: torch.Tensor
    spread: torch.Tensor


@dataclass(frozen=True)
class Region:
    """The slots of one kind that rows may see, in one layer.

    Slot i of kv head h of sequence s lies in page table[s, h, j // page_slots] at place
    j % page_slots, with j = i % ring[s] where ring[s] > 0, else j = i. Row r sees the slots
    start[r, h] <= i < stop[r, h] of its sequence.

    table: [sequences, kv_heads, table_pages] int32; start, stop: [rows, kv_heads] int32;
    ring: [sequences] int32, or None where nothing wraps. `start` None: from slot 0 on.
    """

    pages: Pages
    table: torch.Tensor
    stop: torch.Tensor
    start: torch.Tensor | None = None
    ring: torch.Tensor | None = None
