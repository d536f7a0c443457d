"""Writing tokens into pages, as they are or quantised; one program for one key or value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.paged import GROUP, HighPages, KeyShift, LowPages
from kernels.triton.jit import jit

# Adding and taking away 1.5 * 2^23 leaves an fp32 number of less than 2^22 rounded to an integer,
# halves to even. Nothing reorders fp32 additions.
ROUNDING = tl.constexpr(12582912.0)


@jit
def _append_high(
    data: tl.tensor,
    table: tl.tensor,
    sequences: tl.tensor,
    slots: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    kv_heads: tl.tensor,
    table_sequence: tl.tensor,
    table_head: tl.tensor,
    data_page: tl.tensor,
    data_half: tl.tensor,
    data_slot: tl.tensor,
    PAGE_SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    of_row = row.to(tl.int64) * kv_heads + head
    slot = tl.load(slots + of_row)
    if slot >= 0:
        pages = table + tl.load(sequences + row).to(tl.int64) * table_sequence + head * table_head
        page = tl.load(pages + slot // PAGE_SLOTS).to(tl.int64)
        at = data + page * data_page + (slot % PAGE_SLOTS) * data_slot
        channel = tl.arange(0, PADDED_DIM)
        inside = channel < HEAD_DIM
        key = tl.load(k + of_row * HEAD_DIM + channel, mask=inside, other=0.0)
        value = tl.load(v + of_row * HEAD_DIM + channel, mask=inside, other=0.0)
        tl.store(at + channel, key, mask=inside)
        tl.store(at + data_half + channel, value, mask=inside)


@jit
def _read_shifted(
    x: tl.tensor, center: tl.tensor, spread: tl.tensor, channel: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """(x - center) / spread of some channels; as it is without statistics."""
    found = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    if center is not None:
        middle = tl.load(center + channel, mask=inside, other=0.0).to(tl.float32)
        width = tl.load(spread + channel, mask=inside, other=1.0).to(tl.float32)
        found = tl.div_rn(found - middle, width)
    return found


@jit
def _codes(x: tl.tensor, zero: tl.tensor, scale: tl.tensor, TOP: tl.constexpr) -> tl.tensor:
    """clamp(round_half_even((x - zero) / scale), 0, TOP) int32; x [groups, n, m]."""
    steps = tl.div_rn(x - zero[:, None, None], scale[:, None, None])
    # Clamping first changes no code and keeps the numbers where rounding works.
    steps = tl.minimum(tl.maximum(steps, 0.0), TOP * 1.0)
    return ((steps + ROUNDING) - ROUNDING).to(tl.int32)


@jit
def _quantise_into(
    codes: tl.tensor,
    ranges: tl.tensor,
    x: tl.tensor,
    center: tl.tensor,
    spread: tl.tensor,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Codes and ranges of one key or value; all pointers are to its own first element.

    Channels are read in the order in which their codes lie in the page, as [groups, bytes, codes
    of a byte]: a byte is then a sum over the last axis.
    """
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    PER_BYTE: tl.constexpr = 8 // WIDTH
    TOP: tl.constexpr = (1 << BITS) - 1
    group = tl.arange(0, PADDED_GROUPS)
    present = group < GROUPS
    byte = tl.arange(0, 4 * WIDTH)
    within = tl.arange(0, PER_BYTE)
    column = byte[:, None] * PER_BYTE + within[None, :]
    inside = column // 4 + 8 * (column % 4)
    channel = group[:, None, None] * 32 + inside[None, :, :]
    numbers = _read_shifted(x, center, spread, channel, present[:, None, None])
    low = tl.min(tl.min(numbers, axis=2), axis=1)
    high = tl.max(tl.max(numbers, axis=2), axis=1)
    zero = low.to(tl.float16)
    scale = tl.div_rn(high - low, tl.full([PADDED_GROUPS], TOP, tl.float32)).to(tl.float16)
    scale = tl.where(scale == 0.0, 1.0, scale).to(tl.float16)
    tl.store(ranges + 2 * group, scale, mask=present)
    tl.store(ranges + 2 * group + 1, zero, mask=present)
    zero, scale = zero.to(tl.float32), scale.to(tl.float32)
    code = _codes(numbers, zero, scale, TOP) & ((1 << WIDTH) - 1)
    packed = tl.sum(code << (WIDTH * within)[None, None, :], axis=2)
    at = codes + group[:, None] * (4 * BITS)
    tl.store(at + byte[None, :], packed.to(tl.uint8), mask=present[:, None])
    if BITS == 3:
        # The high bits lie in channel order, eight to a byte.
        byte, within = tl.arange(0, 4), tl.arange(0, 8)
        inside = byte[:, None] * 8 + within[None, :]
        channel = group[:, None, None] * 32 + inside[None, :, :]
        numbers = _read_shifted(x, center, spread, channel, present[:, None, None])
        code = _codes(numbers, zero, scale, TOP) >> 2
        packed = tl.sum(code << within[None, None, :], axis=2)
        tl.store(at + 8 + byte[None, :], packed.to(tl.uint8), mask=present[:, None])


@jit
def _append_low(
    codes: tl.tensor,
    ranges: tl.tensor,
    table: tl.tensor,
    sequences: tl.tensor,
    slots: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    center: tl.tensor,
    spread: tl.tensor,
    kv_heads: tl.tensor,
    table_sequence: tl.tensor,
    table_head: tl.tensor,
    codes_page: tl.tensor,
    codes_half: tl.tensor,
    codes_slot: tl.tensor,
    ranges_page: tl.tensor,
    ranges_half: tl.tensor,
    ranges_slot: tl.tensor,
    PAGE_SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    of_row = row.to(tl.int64) * kv_heads + head
    slot = tl.load(slots + of_row)
    if slot >= 0:
        sequence = tl.load(sequences + row).to(tl.int64)
        page = tl.load(table + sequence * table_sequence + head * table_head + slot // PAGE_SLOTS)
        place = slot % PAGE_SLOTS
        codes_at = codes + page.to(tl.int64) * codes_page + place * codes_slot
        ranges_at = ranges + page.to(tl.int64) * ranges_page + place * ranges_slot
        x_at = of_row * GROUPS * 32
        shift_at = (sequence * kv_heads + head) * GROUPS * 32
        _quantise_into(
            codes_at,
            ranges_at,
            k + x_at,
            center + shift_at if center is not None else None,
            spread + shift_at if spread is not None else None,
            GROUPS,
            PADDED_GROUPS,
            BITS,
        )
        _quantise_into(
            codes_at + codes_half,
            ranges_at + ranges_half,
            v + x_at,
            None,
            None,
            GROUPS,
            PADDED_GROUPS,
            BITS,
        )


def append_high(
    pages: HighPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """As `kernels.reference.append_high`."""
    rows, kv_heads, head_dim = k.shape
    if not rows:
        return
    _append_high[rows, kv_heads](
        pages.data,
        table,
        sequence.contiguous(),
        slot.contiguous(),
        k.to(pages.data.dtype).contiguous(),
        v.to(pages.data.dtype).contiguous(),
        kv_heads,
        *table.stride()[:2],
        *pages.data.stride()[:3],
        PAGE_SLOTS=pages.page_slots,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=1,
    )


def append_low(
    pages: LowPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shift: KeyShift | None,
) -> None:
    """As `kernels.reference.append_low`, to the bit.

    Raises ValueError for a head_dim that is no multiple of 32.
    """
    rows, kv_heads, head_dim = k.shape
    if head_dim % GROUP:
        raise ValueError(f"head_dim {head_dim} is no multiple of {GROUP}")
    if not rows:
        return
    groups = head_dim // GROUP
    _append_low[rows, kv_heads](
        pages.codes,
        pages.ranges,
        table,
        sequence.contiguous(),
        slot.contiguous(),
        k.float().contiguous(),
        v.float().contiguous(),
        None if shift is None else shift.center.contiguous(),
        None if shift is None else shift.spread.contiguous(),
        kv_heads,
        *table.stride()[:2],
        *pages.codes.stride()[:3],
        *pages.ranges.stride()[:3],
        PAGE_SLOTS=pages.page_slots,
        GROUPS=groups,
        PADDED_GROUPS=triton.next_power_of_2(groups),
        BITS=pages.bits,
        num_warps=1,  # 32 to 256 numbers: a warp has them in registers
    )
