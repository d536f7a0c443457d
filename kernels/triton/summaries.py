"""Chunk summaries of the keys, and the slots they single out (RocketKV, arXiv:2502.14051)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.paged import HighPages, Region
from kernels.triton.jit import jit_varying

# A tile of 32 x 128 numbers is 32 registers a thread at 4 warps; batches are rarely larger.
ROWS = 32
# 32 chunks of the chosen channels; each program has its own choice of channels to make, which is
# why they are not fewer.
CHUNKS = 32
# Channels that are compared with all others at once.
RIVALS = tl.constexpr(16)


@jit_varying("rows")
def _append_bounds(
    data: tl.tensor,
    table: tl.tensor,
    sequences: tl.tensor,
    slots: tl.tensor,
    k: tl.tensor,
    rows: tl.tensor,
    kv_heads: tl.tensor,
    chunk: tl.tensor,
    table_sequence: tl.tensor,
    table_head: tl.tensor,
    data_page: tl.tensor,
    data_half: tl.tensor,
    data_slot: tl.tensor,
    ROWS: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    """The chunk of one row and kv head, if no row before it has the same chunk.

    Taking rows in order means: what comes before the last row that opens the chunk is forgotten.
    The rest is a minimum and a maximum, in which order does not matter.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row * kv_heads + head)
    mine = slot // chunk
    sequence = tl.load(sequences + row)
    near = tl.arange(0, ROWS)
    earlier = 0
    opening = -1
    if slot >= 0:
        for block in range(0, rows, ROWS):
            other = block + near
            of_mine = tl.load(sequences + other, mask=other < rows, other=-1) == sequence
            others = tl.load(slots + other * kv_heads + head, mask=of_mine, other=-1)
            same = (others >= 0) & (others // chunk == mine)
            earlier += tl.sum((same & (other < row)).to(tl.int32), axis=0)
            opens = same & (others % chunk == 0)
            opening = tl.maximum(opening, tl.max(tl.where(opens, other, -1), axis=0))
    if (slot >= 0) & (earlier == 0):
        pages = table + sequence.to(tl.int64) * table_sequence + head * table_head
        page = tl.load(pages + mine // PAGE_SLOTS).to(tl.int64)
        at = data + page * data_page + (mine % PAGE_SLOTS) * data_slot
        channel = tl.arange(0, PADDED_DIM)
        inside = channel < HEAD_DIM
        stored = channel < tl.where(opening < 0, HEAD_DIM, 0)
        low = tl.load(at + channel, mask=stored, other=float("inf")).to(tl.float32)
        high = tl.load(at + data_half + channel, mask=stored, other=float("-inf")).to(tl.float32)
        for block in range(0, rows, ROWS):
            other = block + near
            of_mine = tl.load(sequences + other, mask=other < rows, other=-1) == sequence
            others = tl.load(slots + other * kv_heads + head, mask=of_mine, other=-1)
            used = (others >= 0) & (others // chunk == mine) & (other >= opening)
            keys_at = (other.to(tl.int64) * kv_heads + head) * HEAD_DIM
            keys_at = k + keys_at[:, None] + channel[None, :]
            mask = used[:, None] & inside[None, :]
            below = tl.load(keys_at, mask=mask, other=float("inf")).to(tl.float32)
            above = tl.load(keys_at, mask=mask, other=float("-inf")).to(tl.float32)
            low = tl.minimum(low, tl.min(below, axis=0))
            high = tl.maximum(high, tl.max(above, axis=0))
        tl.store(at + channel, low.to(data.dtype.element_ty), mask=inside)
        tl.store(at + data_half + channel, high.to(data.dtype.element_ty), mask=inside)


@jit_varying("channels", "capacity")
def _chunk_logits(
    q: tl.tensor,
    sequences: tl.tensor,
    table: tl.tensor,
    stop: tl.tensor,
    data: tl.tensor,
    logits: tl.tensor,
    kv_heads: tl.tensor,
    chunk: tl.tensor,
    channels: tl.tensor,
    capacity: tl.tensor,
    table_sequence: tl.tensor,
    table_head: tl.tensor,
    data_page: tl.tensor,
    data_half: tl.tensor,
    data_slot: tl.tensor,
    group: tl.tensor,
    CHUNKS: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    """logits[row, head, member, chunk] of some chunks, -inf behind the last one."""
    row, head = tl.program_id(0), tl.program_id(1)
    of_row = row.to(tl.int64) * kv_heads + head
    index = tl.program_id(2) * CHUNKS + tl.arange(0, CHUNKS)
    stored = (tl.load(stop + of_row) + chunk - 1) // chunk
    seen = index < stored
    channel = tl.arange(0, PADDED_DIM)
    inside = channel < HEAD_DIM
    queries = q + of_row * group * HEAD_DIM
    total = tl.zeros([PADDED_DIM], tl.float32)
    size = tl.zeros([PADDED_DIM], tl.float32)
    for member in range(group):
        query = tl.load(queries + member * HEAD_DIM + channel, mask=inside, other=0.0)
        total += query
        size += tl.abs(query)
    size = size / group
    # A channel is chosen if fewer than `channels` others come before it; sizes that are compared
    # come from the same additions.
    place = tl.zeros([PADDED_DIM], tl.int32)
    for first in range(0, HEAD_DIM, RIVALS):
        rival = first + tl.arange(0, RIVALS)
        rival_size = tl.zeros([RIVALS], tl.float32)
        for member in range(group):
            near = tl.load(queries + member * HEAD_DIM + rival, mask=rival < HEAD_DIM, other=0.0)
            rival_size += tl.abs(near)
        rival_size = tl.where(rival < HEAD_DIM, rival_size / group, -1.0)
        larger = rival_size[None, :] > size[:, None]
        level = (rival_size[None, :] == size[:, None]) & (rival[None, :] < channel[:, None])
        place += tl.sum((larger | level).to(tl.int32), axis=1)
    picked = inside & (place < channels)
    pages = table + tl.load(sequences + row).to(tl.int64) * table_sequence + head * table_head
    page = tl.load(pages + index // PAGE_SLOTS, mask=seen, other=0).to(tl.int64)
    at = page * data_page + (index % PAGE_SLOTS) * data_slot
    upper = tl.where(total > 0.0, 1, 0) * data_half
    corner = tl.load(
        data + at[:, None] + (upper + channel)[None, :],
        mask=seen[:, None] & picked[None, :],
        other=0.0,
    ).to(tl.float32)
    out = logits + of_row * group * capacity + index
    for member in range(group):
        query = tl.load(queries + member * HEAD_DIM + channel, mask=inside, other=0.0)
        found = tl.sum(corner * tl.where(picked, query, 0.0)[None, :], axis=1)
        absolute = tl.abs(query)
        # A query of zeros has no share; its logits stay 0.
        whole = tl.maximum(tl.sum(absolute, axis=0), 1.1754943508222875e-38)
        share = tl.sum(tl.where(picked, absolute, 0.0), axis=0) / whole
        found = found / tl.sqrt(tl.maximum(HEAD_DIM * share, 1.1754943508222875e-38))
        found = tl.where(seen, found, float("-inf"))
        tl.store(out + member * capacity, found, mask=index < capacity)


def append_bounds(
    pages: HighPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    chunk: int,
) -> None:
    """As `kernels.reference.append_bounds`."""
    rows, kv_heads, head_dim = k.shape
    if not rows:
        return
    _append_bounds[rows, kv_heads](
        pages.data,
        table,
        sequence.contiguous(),
        slot.contiguous(),
        k.to(pages.data.dtype).contiguous(),
        rows,
        kv_heads,
        chunk,
        *table.stride()[:2],
        *pages.data.stride()[:3],
        ROWS=ROWS,
        PAGE_SLOTS=pages.page_slots,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def choose_slots(
    q: torch.Tensor,
    sequence: torch.Tensor,
    bounds: Region,
    stop: torch.Tensor,
    chunk: int,
    channels: int,
    count: int,
) -> torch.Tensor:
    """As `kernels.reference.choose_slots`; the selection is torch's sort, on the device."""
    rows, kv_heads, group, head_dim = q.shape
    pages = bounds.pages
    if not isinstance(pages, HighPages):
        raise ValueError("bounds lie in HighPages")
    capacity = bounds.table.shape[2] * pages.page_slots
    logits = torch.empty(rows, kv_heads, group, capacity, dtype=torch.float32, device=q.device)
    if not logits.numel():
        return stop.new_full((rows, kv_heads, count), -1, dtype=torch.int32)
    _chunk_logits[rows, kv_heads, triton.cdiv(capacity, CHUNKS)](
        q.float().contiguous(),
        sequence.contiguous(),
        bounds.table,
        stop.contiguous(),
        pages.data,
        logits,
        kv_heads,
        chunk,
        channels,
        capacity,
        *bounds.table.stride()[:2],
        *pages.data.stride()[:3],
        group,
        CHUNKS=CHUNKS,
        PAGE_SLOTS=pages.page_slots,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return _best_tokens(logits, stop, chunk, count)


def _best_tokens(logits: torch.Tensor, stop: torch.Tensor, chunk: int, count: int) -> torch.Tensor:
    """The last step, from logits [rows, kv_heads, group, chunks]; no host reads the device.

    All tokens of a chunk are equal, so chunks are sorted, and whole ones taken, but for the last:
    of it the highest slots.
    """
    index = torch.arange(logits.shape[-1], device=logits.device)
    tokens = (stop[..., None].long() - index * chunk).clamp(0, chunk)  # of each chunk
    # Where nothing is stored, all logits are -inf and no token will be taken: nan does no harm.
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    weights = weights / (weights * tokens[:, :, None]).sum(-1, keepdim=True)
    weights = weights.mean(2).masked_fill(tokens == 0, -1.0)
    best = index[-1] - weights.flip(-1).argsort(dim=-1, descending=True, stable=True)
    sorted_tokens = tokens.gather(-1, best)
    before = sorted_tokens.cumsum(-1) - sorted_tokens
    taken = torch.zeros_like(tokens)
    taken.scatter_(-1, best, torch.minimum(sorted_tokens, (count - before).clamp(min=0)))
    ends = taken.cumsum(-1)
    rank = torch.arange(count, device=logits.device).expand(*stop.shape, count).contiguous()
    owner = torch.searchsorted(ends, rank, right=True)
    found = owner < logits.shape[-1]
    owner = owner.clamp(max=logits.shape[-1] - 1)
    from_end = ends.gather(-1, owner) - rank  # 1 for the last token of a chunk
    slots = owner * chunk + tokens.gather(-1, owner) - from_end
    return torch.where(found, slots, -1).to(torch.int32)
