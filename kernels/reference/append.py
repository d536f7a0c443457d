"""Writing tokens into pages, as they are or quantised."""

from __future__ import annotations

import torch

from kernels.paged import CHANNEL_BITS, GROUP, ChannelPages, HighPages, KeyShift, LowPages
from kernels.reference.codes import pack, quantise


def append_high(
    pages: HighPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Put row r's key and value of kv head h into slot[r, h] of sequence[r], in place.

    k, v: [rows, kv_heads, head_dim], rounded to the pages' dtype; table: [sequences, kv_heads,
    table_pages] int32; sequence: [rows] int32; slot: [rows, kv_heads] int32, -1 where nothing is
    written, wrapped already if the slots are a ring. No two rows may name one slot.
    """
    rows, heads, page, place = destinations(table, sequence, slot, pages.page_slots)
    pages.data[page, 0, place] = k[rows, heads].to(pages.data.dtype)
    pages.data[page, 1, place] = v[rows, heads].to(pages.data.dtype)


def append_low(
    pages: LowPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shift: KeyShift | None,
) -> None:
    """The same into quantised pages; with a `shift`, keys are stored as (k - center) / spread.

    All arithmetic is fp32 and defined to the bit (`quantise`), so that every body writes the same
    codes. head_dim must be a multiple of 32.
    """
    rows, heads, page, place = destinations(table, sequence, slot, pages.page_slots)
    keys = k[rows, heads].float()
    if shift is not None:
        owner = sequence[rows].long()
        keys = (keys - shift.center[owner, heads].float()) / shift.spread[owner, heads].float()
    for half, x in enumerate((keys, v[rows, heads])):
        codes, ranges = quantise(x, pages.bits)
        pages.codes[page, half, place] = pack(codes, pages.bits)
        pages.ranges[page, half, place] = ranges


def put_channel(pages: ChannelPages, page: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Quantise whole groups of 32 tokens into pages, keys by channel, in place.

    Group n's tokens go into page[n], in their order. Arithmetic as for `append_low`, with the 32
    tokens of a channel in the place of 32 channels for keys. page: [groups] integers, no page
    twice; k, v: [groups, 32, head_dim]. ValueError for other groups or a head_dim that is no
    multiple of 32.
    """
    if k.shape != v.shape or k.shape[1] != GROUP:
        raise ValueError(f"keys {tuple(k.shape)} and values are not in groups of {GROUP} tokens")
    at = page.long()
    codes, ranges = quantise(k.transpose(1, 2), CHANNEL_BITS)
    pages.codes[at, 0] = pack(codes.transpose(1, 2).contiguous(), CHANNEL_BITS)
    pages.ranges[at, 0] = ranges.flatten(1, 2)
    codes, ranges = quantise(v, CHANNEL_BITS)
    pages.codes[at, 1] = pack(codes, CHANNEL_BITS)
    pages.ranges[at, 1] = ranges.flatten(1, 2)


def destinations(
    table: torch.Tensor, sequence: torch.Tensor, slot: torch.Tensor, page_slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the slots that are not -1 lie: rows, kv heads, pages, places; [written] each."""
    rows, heads = torch.nonzero(slot >= 0, as_tuple=True)
    at = slot[rows, heads].long()
    page = table[sequence[rows].long(), heads, at // page_slots].long()
    return rows, heads, page, at % page_slots
