"""Pieces of kernels: where a slot lies, what is stored there, and dot products without loss.

Tensor cores multiply 16-bit numbers exactly but take only 16-bit operands, and the operations are
defined in fp32. So the fp32 side of every product (queries, probabilities) is split into a 16-bit
number and the 16-bit remainder, which stand above each other in one tile: up to 8 query heads and
their remainders fill the 16 rows that a tensor core wants anyway, so this exactness is free there.
"""

from __future__ import annotations

import triton.language as tl

from kernels.triton.jit import jit

CHUNK = tl.constexpr(32)
"""Channels of one dot product: a group of quantised pages, whose scale and zero they share."""

AS_STORED = tl.constexpr(16)
"""Code width that stands for pages without codes (HighPages, whatever their dtype)."""


@jit
def split_parts(x: tl.tensor, PARTS: tl.constexpr, OPERAND: tl.constexpr) -> tl.tensor:
    """x [rows, n] fp32 as [PARTS * rows, n] OPERAND: the rounded numbers, then what is missing."""
    rounded = x.to(OPERAND)
    parts = rounded
    if PARTS == 2:
        rest = (x - rounded.to(tl.float32)).to(OPERAND)
        upper = tl.arange(0, 2)[:, None, None] == 0
        both = tl.where(upper, rounded[None, :, :], rest[None, :, :])
        parts = tl.reshape(both, [2 * x.shape[0], x.shape[1]])
    return parts


@jit
def join_parts(x: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The sum over the parts: x [PARTS * rows, n] as [rows, n]."""
    whole = x
    if PARTS == 2:
        whole = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), axis=0)
    return whole


@jit
def visible_slots(
    row: tl.tensor,
    head: tl.tensor,
    split: tl.tensor,
    sequence: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    ring: tl.tensor,
    chosen: tl.tensor,
    chosen_count: tl.tensor,
    kv_heads: tl.tensor,
    SLOTS: tl.constexpr,
) -> tl.tensor:
    """(slots of a split, unwrapped from a ring; which of them the row sees): [SLOTS] each."""
    of_row = row.to(tl.int64) * kv_heads + head
    index = split * SLOTS + tl.arange(0, SLOTS)
    if chosen is not None:
        slot = tl.load(chosen + of_row * chosen_count + index, mask=index < chosen_count, other=-1)
        seen = slot >= 0
    else:
        slot = index
        if start is not None:
            slot += tl.load(start + of_row)
        seen = slot < tl.load(stop + of_row)
    slot = tl.where(seen, slot, 0)
    if ring is not None:
        length = tl.load(ring + sequence)
        slot = tl.where(length > 0, slot % tl.maximum(length, 1), slot)
    return slot, seen


@jit
def find_slots(
    table: tl.tensor, slot: tl.tensor, seen: tl.tensor, PAGE_SLOTS: tl.constexpr
) -> tl.tensor:
    """(page, place in it) of slots: table points to one (sequence, kv head)'s page numbers."""
    page = tl.load(table + slot // PAGE_SLOTS, mask=seen, other=0)
    # Page numbers times page sizes outgrow 32 bits on large devices.
    return page.to(tl.int64), slot % PAGE_SLOTS


@jit
def chunk_channels(chunk: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The channel in each column of a chunk: coded pages hold channels w, w+8, w+16, w+24 in a row.

    [CHUNK] int32; the order of a dot product's terms is free, so codes stay in the order they
    come in and the queries are read to match.
    """
    column = tl.arange(0, CHUNK)
    inside = column
    if BITS != AS_STORED:
        inside = column // 4 + 8 * (column % 4)
    return chunk * CHUNK + inside


@jit
def load_chunk(
    data: tl.tensor,
    at: tl.tensor,
    chunk: tl.tensor,
    seen: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> tl.tensor:
    """What slots hold in one chunk: [slots, CHUNK] numbers or codes, exact in OPERAND.

    at: [slots] int64, each slot's first element in data. Columns are `chunk_channels`.
    """
    if BITS == AS_STORED:
        channel = chunk_channels(chunk, BITS)
        mask = seen[:, None] & (channel < HEAD_DIM)[None, :]
        found = tl.load(data + at[:, None] + channel[None, :], mask=mask, other=0.0).to(OPERAND)
    else:
        WORD_BYTES: tl.constexpr = 8 if BITS == 3 else 4 * BITS
        start = at + chunk * 4 * BITS
        byte = tl.load(
            data + start[:, None] + tl.arange(0, WORD_BYTES)[None, :], mask=seen[:, None], other=0
        )
        code = byte.to(tl.int16)
        # Joining puts a byte's codes next to each other without moving them between threads.
        if BITS <= 4:
            code = tl.join(code & 15, code >> 4)
            code = tl.reshape(code, [at.shape[0], 2 * WORD_BYTES])
        if BITS <= 3:
            code = tl.join(code & 3, code >> 2)
            code = tl.reshape(code, [at.shape[0], CHUNK])
        if BITS == 3:
            inside = chunk_channels(0, BITS)
            high = tl.load(
                data + start[:, None] + 8 + (inside // 8)[None, :], mask=seen[:, None], other=0
            )
            high = (high.to(tl.int32) >> (inside % 8)[None, :]) & 1
            code = code | (high << 2).to(tl.int16)
        # 1024 + code is the fp16 number with these bits: cheaper than converting an integer.
        found = (code | 0x6400).to(tl.float16, bitcast=True) - 1024.0
        found = found.to(OPERAND)
    return found
