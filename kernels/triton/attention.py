"""Attention of single query tokens over paged regions: split, attend, merge (flash decoding).

Each region is cut into splits of a fixed number of slots, counted from the first slot that a row
sees. One program attends over one split of one row and kv head for the whole query group and
leaves (weighted sum of values, largest score, sum of weights) in a workspace; a second kernel
merges the splits by their log-sum-exp. No grid depends on what is in a tensor, so that nothing
waits for the device; the one exception is `probabilities`, which asks it how wide the answer is.

Splits are merged in blocks that begin anew with every region. A block whose splits are all empty
adds zeros, so neither the other rows of a call nor the width of the tables changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.paged import GROUP, ChannelPages, HighPages, KeyShift, Region
from kernels.triton.jit import jit_varying
from kernels.triton.splits import attend_split, store_probabilities
from kernels.triton.tiles import AS_STORED

WORKSPACE_BYTES = 1 << 28
"""Rows are attended in slabs whose partial results fit in here (256 MiB)."""

# A split is what one program reads: 128 kB of 16-bit pages or 40 kB of 4-bit codes at head_dim 128,
# worth the partial result that it leaves (2 kB for a query group of 4), and short enough that
# 8 sequences of 8,192 tokens with 8 kv heads are 2,048 programs. At 4 warps a thread holds 16
# registers of scores, and three programs fit on a processor of an Ampere or Hopper GPU.
SLOTS, WARPS = 256, 4
# fp32 pages leave no tensor core to use; they are for tests, and small splits compile quickly.
FLOAT_SLOTS = 32

MERGED_AT_ONCE = tl.constexpr(16)
"""Splits of a block in the merge."""

_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def paged_attention(
    q: torch.Tensor,
    sequence: torch.Tensor,
    regions: Sequence[Region],
    shift: KeyShift | None = None,
    *,
    chosen: torch.Tensor | None = None,
    probabilities: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.reference.paged_attention`: same shapes, dtypes and order of columns.

    With `probabilities` the host waits once, for the width of the answer. A row that sees no slot
    gets NaN: to refuse it, the host would have to wait for every call. Raises ValueError for
    quantised pages whose head_dim is no multiple of 32 and for pages of a dtype other than fp16,
    bf16 and fp32.
    """
    q, sequence = q.float().contiguous(), sequence.to(torch.int32).contiguous()
    parts = [
        _Part(region, shift, chosen if index == 0 else None, q.shape[2], q.shape[3])
        for index, region in enumerate(regions)
    ]
    parts = [part for part in parts if part.splits]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not len(q):
        return (out, q.new_zeros(*lse.shape, 0)) if probabilities else out
    slab = max(1, WORKSPACE_BYTES // (4 * sum(part.places for part in parts) * q[0].numel()))
    for first in range(0, len(q), slab):
        rows = slice(first, first + slab)
        _attend(q[rows], sequence[rows], [part.of(rows) for part in parts], out[rows], lse[rows])
    return (out, _probabilities(q, sequence, parts, lse)) if probabilities else out


@dataclass(frozen=True)
class _Part:
    """A region as one call reads it; `chosen` replaces its start .. stop."""

    region: Region
    shift: KeyShift | None
    chosen: torch.Tensor | None
    group: int
    head_dim: int

    def of(self, rows: slice) -> _Part:
        """The same for some of the rows."""
        start, chosen = self.region.start, self.chosen
        region = replace(
            self.region,
            stop=self.region.stop[rows],
            start=None if start is None else start[rows],
        )
        return replace(self, region=region, chosen=None if chosen is None else chosen[rows])

    @property
    def splits(self) -> int:
        """Enough splits for any row, from shapes alone."""
        region = self.region
        slots = region.table.shape[2] * region.pages.page_slots
        if self.chosen is not None:
            slots = self.chosen.shape[2]
        return -(-slots // self.split_slots)

    @property
    def places(self) -> int:
        """Places of the workspace: whole blocks of the merge."""
        block: int = MERGED_AT_ONCE.value
        return -(-self.splits // block) * block

    @property
    def split_slots(self) -> int:
        return FLOAT_SLOTS if self.arithmetic == torch.float32 else SLOTS

    @property
    def arithmetic(self) -> torch.dtype:
        """What the operands of dot products are: codes are exact in fp16."""
        pages = self.region.pages
        if not isinstance(pages, HighPages):
            return torch.float16
        dtype = pages.data.dtype
        if dtype not in _OPERANDS:
            raise ValueError(f"pages of {dtype} are not supported")
        # The interpreter's dot product takes bf16 for integers.
        interpreted = triton.knobs.runtime.interpret
        return torch.float32 if interpreted and dtype == torch.bfloat16 else dtype

    @property
    def visible(self) -> torch.Tensor:
        """How many slots each row sees: [rows, kv_heads] int64."""
        if self.chosen is not None:
            return (self.chosen >= 0).sum(-1)
        start, stop = self.region.start, self.region.stop.long()
        return (stop if start is None else stop - start).clamp(min=0)

    def arguments(self) -> dict[str, Any]:
        """What both kernels take of a region, by name."""
        region, pages, chosen = self.region, self.region.pages, self.chosen
        center = spread = ranges = None
        ranges_page = ranges_half = ranges_slot = 0
        by_channel = isinstance(pages, ChannelPages)
        if isinstance(pages, HighPages):
            data, bits = pages.data, AS_STORED.value
        else:
            if self.head_dim % GROUP:
                raise ValueError(f"head_dim {self.head_dim} is no multiple of {GROUP}")
            data, ranges, bits = pages.codes, pages.ranges, pages.bits
            ranges_page, ranges_half = ranges.stride()[:2]
            # By channel, the third dimension is a value's token and its group together.
            ranges_slot = ranges.stride(2) * (self.head_dim // GROUP if by_channel else 1)
            if self.shift is not None and not by_channel:
                center, spread = self.shift.center.contiguous(), self.shift.spread.contiguous()
        operand = _OPERANDS[self.arithmetic]
        data_page, data_half, data_slot = data.stride()[:3]
        exact = operand == tl.float32
        members = triton.next_power_of_2(self.group)
        return {
            "table": region.table,
            "start": None if region.start is None else region.start.contiguous(),
            "stop": region.stop.contiguous(),
            "ring": region.ring,
            "chosen": None if chosen is None else chosen.contiguous(),
            "center": center,
            "spread": spread,
            "data": data,
            "ranges": ranges,
            "group": self.group,
            "kv_heads": region.table.shape[1],
            "chosen_count": 0 if chosen is None else chosen.shape[2],
            "table_sequence": region.table.stride(0),
            "table_head": region.table.stride(1),
            "data_page": data_page,
            "data_half": data_half,
            "data_slot": data_slot,
            "ranges_page": ranges_page,
            "ranges_half": ranges_half,
            "ranges_slot": ranges_slot,
            # Scores are in powers of 2: the hardware's exponential is exp2.
            "scale": self.head_dim**-0.5 * math.log2(math.e),
            "SLOTS": self.split_slots,
            "PAGE_SLOTS": pages.page_slots,
            "MEMBERS": max(16, members) if exact else max(8, members),
            "PARTS": 1 if exact else 2,
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": triton.next_power_of_2(self.head_dim),
            "BITS": bits,
            "BY_CHANNEL": by_channel,
            "OPERAND": operand,
            "num_warps": WARPS,
        }


def _attend(
    q: torch.Tensor,
    sequence: torch.Tensor,
    parts: Sequence[_Part],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Fill out like q, and lse [rows, kv_heads, group]: log2 of the softmax's denominator."""
    rows, kv_heads, group, head_dim = q.shape
    places = sum(part.places for part in parts)
    # Programs of empty splits leave nothing behind.
    tops = q.new_full((rows, kv_heads, places, group), -math.inf)
    totals = torch.empty_like(tops)
    sums = q.new_empty(*tops.shape, head_dim)
    first = 0
    for part in parts:
        attend_split[rows, kv_heads, part.splits](
            q=q,
            sequences=sequence,
            sums=sums,
            tops=tops,
            totals=totals,
            first_place=first,
            places=places,
            **part.arguments(),
        )
        first += part.places
    _merge_splits[(rows * kv_heads * group,)](
        sums,
        tops,
        totals,
        out,
        lse,
        group,
        places,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
    )


def _probabilities(
    q: torch.Tensor, sequence: torch.Tensor, parts: Sequence[_Part], lse: torch.Tensor
) -> torch.Tensor:
    """[rows, kv_heads, group, width], from the lse that `_attend` gave."""
    rows, kv_heads, group, _ = q.shape
    visible = torch.stack([part.visible for part in parts])
    ends = visible.cumsum(0)
    width = int(ends[-1].max())
    out = q.new_zeros(rows, kv_heads, group, width)
    for part, first_column in zip(parts, ends - visible, strict=True):
        ranks = None
        if part.chosen is not None:
            ranks = (part.chosen >= 0).cumsum(-1) - 1
        store_probabilities[rows, kv_heads, part.splits](
            q=q,
            sequences=sequence,
            first_column=first_column,
            ranks=ranks,
            lse=lse,
            out=out,
            width=width,
            **part.arguments(),
        )
    return out


@jit_varying("places")
def _merge_splits(
    sums: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    group: tl.tensor,
    places: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    """One query head of one row: its splits, weighted by their shares of the softmax.

    places is a multiple of MERGED_AT_ONCE; the top of an unused one is -inf.
    """
    query = tl.program_id(0).to(tl.int64)
    row_head, member = query // group, query % group
    channel = tl.arange(0, PADDED_DIM)
    inside = channel < HEAD_DIM
    inside_block = tl.arange(0, MERGED_AT_ONCE)
    first = row_head * places * group + member
    top = tl.full([MERGED_AT_ONCE], float("-inf"), tl.float32)
    for block in range(0, places, MERGED_AT_ONCE):
        place = block + inside_block
        top = tl.maximum(top, tl.load(tops + first + place * group))
    largest = tl.max(top, axis=0)
    mixed = tl.zeros([PADDED_DIM], tl.float32)
    total = tl.zeros([1], tl.float32)
    for block in range(0, places, MERGED_AT_ONCE):
        place = block + inside_block
        at = first + place * group
        found = tl.load(tops + at)
        used = found > float("-inf")
        share = tl.where(used, tl.exp2(found - largest), 0.0)
        total += tl.sum(share * tl.load(totals + at, mask=used, other=0.0), axis=0)
        part = tl.load(
            sums + at[:, None] * HEAD_DIM + channel[None, :],
            mask=used[:, None] & inside[None, :],
            other=0.0,
        )
        mixed += tl.sum(share[:, None] * part, axis=0)
    tl.store(out + query * HEAD_DIM + channel, mixed / total, mask=inside)
    tl.store(lse + query + tl.zeros([1], tl.int32), largest + tl.log2(total))
