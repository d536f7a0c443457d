"""Reading slots, and choosing them; what the operations mean: `kernels.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import reference
from kernels.cpu.library import fits, operation, pages_arguments, ready, table_arguments
from kernels.paged import ChannelPages, KeyShift, Region


def paged_attention(
    q: torch.Tensor,
    sequence: torch.Tensor,
    regions: Sequence[Region],
    shift: KeyShift | None = None,
    *,
    chosen: torch.Tensor | None = None,
    probabilities: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`kernels.reference.paged_attention`."""
    rows, kv_heads, group, head_dim = q.shape
    if not all(_fits(region, head_dim) for region in regions) or (
        # Its tiles would be of several pages.
        chosen is not None and isinstance(regions[0].pages, ChannelPages)
    ):
        return reference.paged_attention(
            q, sequence, regions, shift, chosen=chosen, probabilities=probabilities
        )
    q, sequence = ready(q, torch.float32), ready(sequence, torch.int32)
    held = [q, sequence]  # what is handed over must live until the call is done
    out = torch.empty_like(q)
    weights, width = None, 0
    if probabilities:
        width = _width(regions, chosen)
        weights = q.new_empty(rows, kv_heads, group, width)
    picks, pick_count = 0, 0
    if chosen is not None:
        held.append(ready(chosen, torch.int32))
        picks, pick_count = held[-1].data_ptr(), chosen.shape[2]
    center, spread = 0, 0
    if shift is not None:
        held += (ready(shift.center, torch.float16), ready(shift.spread, torch.float16))
        center, spread = held[-2].data_ptr(), held[-1].data_ptr()
    values = [
        *(rows, kv_heads, group, head_dim, width, pick_count),
        *(q.data_ptr(), sequence.data_ptr(), picks, out.data_ptr()),
        *(0 if weights is None else weights.data_ptr(), center, spread),
        *(torch.get_num_threads(), len(regions)),
    ]
    for region in regions:
        values += _region_arguments(region, rows, kv_heads, held)
    operation("pask_attention")(values)
    return out if weights is None else (out, weights)


def _fits(region: Region, head_dim: int) -> bool:
    wraps = region.ring is not None and isinstance(region.pages, ChannelPages)
    return fits(region.pages, head_dim) and not wraps


def _region_arguments(
    region: Region, rows: int, kv_heads: int, held: list[torch.Tensor]
) -> tuple[int, ...]:
    stop, table = ready(region.stop, torch.int32), ready(region.table, torch.int32)
    if stop.shape != (rows, kv_heads) or table.shape[1] != kv_heads:
        raise ValueError(f"stop {tuple(stop.shape)} and table do not fit {rows} x {kv_heads} heads")
    start, ring = 0, 0
    held += (stop, table)
    if region.start is not None:
        held.append(ready(region.start, torch.int32))
        start = held[-1].data_ptr()
    if region.ring is not None:
        held.append(ready(region.ring, torch.int32))
        ring = held[-1].data_ptr()
    return (
        *(*pages_arguments(region.pages), *table_arguments(table)),
        *(start, stop.data_ptr(), ring),
    )


def _width(regions: Sequence[Region], chosen: torch.Tensor | None) -> int:
    """The largest number of slots that a row sees."""
    total = torch.zeros_like(regions[0].stop)
    for index, region in enumerate(regions):
        if index == 0 and chosen is not None:
            total = total + (chosen >= 0).sum(-1)
        elif region.start is None:
            total = total + region.stop.clamp(min=0)
        else:
            total = total + (region.stop - region.start).clamp(min=0)
    return int(total.max()) if total.numel() else 0


def choose_slots(
    q: torch.Tensor,
    sequence: torch.Tensor,
    bounds: Region,
    stop: torch.Tensor,
    chunk: int,
    channels: int,
    count: int,
) -> torch.Tensor:
    """`kernels.reference.choose_slots`."""
    rows, kv_heads, group, head_dim = q.shape
    if not fits(bounds.pages, head_dim):
        return reference.choose_slots(q, sequence, bounds, stop, chunk, channels, count)
    q, sequence, stop = (
        *(ready(q, torch.float32), ready(sequence, torch.int32)),
        ready(stop, torch.int32),
    )
    table = ready(bounds.table, torch.int32)
    answer = torch.empty(rows, kv_heads, count, dtype=torch.int32)
    operation("pask_choose_slots")(
        (
            *(rows, kv_heads, group, head_dim, q.data_ptr(), sequence.data_ptr()),
            *(stop.data_ptr(), chunk, channels, count, answer.data_ptr()),
            *(*pages_arguments(bounds.pages), *table_arguments(table), torch.get_num_threads()),
        )
    )
    return answer
