"""Attention of query tokens over the slots that each may see, in several kinds of pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.paged import GROUP, ChannelPages, HighPages, KeyShift, LowPages, Pages, Region
from kernels.reference.codes import dequantise, unpack


def paged_attention(
    q: torch.Tensor,
    sequence: torch.Tensor,
    regions: Sequence[Region],
    shift: KeyShift | None = None,
    *,
    chosen: torch.Tensor | None = None,
    probabilities: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """out[r, h, g] = sum_j p_j v_j with p = softmax_j(q[r, h, g] . k_j / sqrt(head_dim)), over
    all slots j that row r sees in kv head h of all regions.

    Keys of `LowPages` are codes of (k - center) / spread where a `shift` is given; it is folded
    into the query: q . (s k' + m) = (q s) . k' + q . m. A row's result depends on nothing but its
    own query and slots, to the bit, so batches and runs may be cut anywhere.

    q: [rows, kv_heads, group, head_dim] fp32; sequence: [rows] int32, an index into the tables and
    the shift. chosen: [rows, kv_heads, n] int32, the slots of the first region that are read, in
    this order, in place of its start .. stop; -1 names none. Every row must see a slot.

    Answers out like q; with `probabilities` also p [rows, kv_heads, group, width] fp32, width the
    largest number of slots that a row sees: first the visible slots of the first region in slot
    order, then the second's, and so on; 0 in the columns that are left.
    """
    outs, all_weights = [], []
    for row in range(q.shape[0]):
        out, weights = _attend(q[row].float(), row, int(sequence[row]), regions, shift, chosen)
        outs.append(out)
        all_weights.append(weights)
    out = torch.stack(outs) if outs else torch.empty_like(q, dtype=torch.float32)
    if not probabilities:
        return out
    width = max((weights.shape[-1] for weights in all_weights), default=0)
    together = q.new_zeros(*q.shape[:3], width, dtype=torch.float32)
    for row, weights in enumerate(all_weights):
        together[row, :, :, : weights.shape[-1]] = weights
    return out, together


def _attend(
    q: torch.Tensor,
    row: int,
    sequence: int,
    regions: Sequence[Region],
    shift: KeyShift | None,
    chosen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row, all kv heads: out [kv_heads, group, head_dim] and p [kv_heads, group, width]."""
    q = q * q.shape[-1] ** -0.5
    scores, values, seen = [], [], []
    for index, region in enumerate(regions):
        picked = chosen[row] if chosen is not None and index == 0 else None
        slots, visible = _slots(region, row, picked)
        if not slots.shape[1]:
            continue
        keys, region_values = _read(region, sequence, slots)
        query, constant = q, torch.zeros_like(q[..., :1])
        if shift is not None and isinstance(region.pages, LowPages):
            query = q * shift.spread[sequence, :, None].float()
            constant = (q * shift.center[sequence, :, None].float()).sum(-1, keepdim=True)
        region_scores = torch.bmm(query, keys.transpose(1, 2)) + constant
        scores.append(region_scores.masked_fill(~visible[:, None], float("-inf")))
        values.append(region_values.masked_fill(~visible[:, :, None], 0.0))
        seen.append(visible)
    visible = torch.cat(seen, 1) if seen else torch.zeros(q.shape[0], 0, dtype=torch.bool)
    if not bool(visible.any(1).all()):
        raise ValueError(f"row {row} sees no slot")
    weights = torch.softmax(torch.cat(scores, -1), -1)
    out = torch.bmm(weights, torch.cat(values, 1))
    # Kv heads may see different numbers of slots: close the gaps that padding left.
    order = torch.argsort(visible.byte(), dim=1, descending=True, stable=True)
    order = order[:, : int(visible.sum(1).max())]
    return out, weights.gather(2, order[:, None].expand(-1, q.shape[1], -1))


def _slots(
    region: Region, row: int, picked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's slots of a region [kv_heads, n], padded, and which of them are real."""
    if picked is not None:
        return picked.long().clamp(min=0), picked >= 0
    stop = region.stop[row].long()
    start = torch.zeros_like(stop) if region.start is None else region.start[row].long()
    count = stop - start
    steps = torch.arange(max(int(count.max()), 0), device=stop.device)
    visible = steps < count[:, None]
    return torch.where(visible, start[:, None] + steps, start[:, None]), visible


def _read(region: Region, sequence: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (still shifted) and values of slots [kv_heads, n] in fp32, [kv_heads, n, head_dim]."""
    ring = 0 if region.ring is None else int(region.ring[sequence])
    at = slots % ring if ring > 0 else slots
    heads = torch.arange(slots.shape[0], device=slots.device)[:, None]
    # A padded slot may lie behind its head's last page: any page will do, it is masked.
    last = region.table.shape[2] - 1
    page = table_page(region, sequence, heads, (at // region.pages.page_slots).clamp(max=last))
    return read_pages(region.pages, page, at % region.pages.page_slots)


def table_page(
    region: Region, sequence: int, heads: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """The table's entries, with page 0 for the ones that were never set."""
    return region.table[sequence, heads, index].long().clamp(min=0)


def read_pages(
    pages: Pages, page: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of the slots `place` of `page` (one shape), in fp32: [..., head_dim] each."""
    if isinstance(pages, HighPages):
        return pages.data[page, 0, place].float(), pages.data[page, 1, place].float()
    if isinstance(pages, ChannelPages):
        return _read_groups(pages, page, place)
    keys, values = (
        dequantise(
            unpack(pages.codes[page, half, place], pages.bits), pages.ranges[page, half, place]
        )
        for half in (0, 1)
    )
    return keys, values


def _read_groups(
    pages: ChannelPages, page: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = unpack(pages.codes[page, 0, place], pages.bits)
    scale, zero = pages.ranges[page, 0].float().unbind(-1)
    keys = codes.float() * scale + zero
    count, _, head_dim, _ = pages.ranges.shape
    by_token = pages.ranges[:, 1].view(count, GROUP, head_dim // GROUP, 2)
    values = dequantise(unpack(pages.codes[page, 1, place], pages.bits), by_token[page, place])
    return keys, values
