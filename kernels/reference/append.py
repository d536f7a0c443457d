"""Writing tokens into pages, as they are or quantised."""

from __future__ import annotations

import torch

from kernels.paged import HighPages, KeyShift, LowPages
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


def destinations(
    table: torch.Tensor, sequence: torch.Tensor, slot: torch.Tensor, page_slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the slots that are not -1 lie: rows, kv heads, pages, places; [written] each."""
    rows, heads = torch.nonzero(slot >= 0, as_tuple=True)
    at = slot[rows, heads].long()
    page = table[sequence[rows].long(), heads, at // page_slots].long()
    return rows, heads, page, at % page_slots
