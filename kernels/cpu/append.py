"""Writing tokens into pages; what the operations mean: `kernels.reference`."""

from __future__ import annotations

import torch

from kernels import reference
from kernels.cpu.library import fits, operation, pages_arguments, ready, table_arguments
from kernels.paged import HighPages, KeyShift, LowPages, Pages


def append_high(
    pages: HighPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """`kernels.reference.append_high`."""
    if not fits(pages, k.shape[-1]):
        return reference.append_high(pages, table, sequence, slot, k, v)
    return _append("pask_append_high", pages, table, sequence, slot, k, v)


def append_low(
    pages: LowPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shift: KeyShift | None,
) -> None:
    """`kernels.reference.append_low`."""
    if not fits(pages, k.shape[-1]):
        return reference.append_low(pages, table, sequence, slot, k, v, shift)
    if shift is None:
        return _append("pask_append_low", pages, table, sequence, slot, k, v, 0, 0)
    center, spread = ready(shift.center, torch.float16), ready(shift.spread, torch.float16)
    ends = center.data_ptr(), spread.data_ptr()
    return _append("pask_append_low", pages, table, sequence, slot, k, v, *ends)


def append_bounds(
    pages: HighPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    chunk: int,
) -> None:
    """`kernels.reference.append_bounds`."""
    if not fits(pages, k.shape[-1]):
        return reference.append_bounds(pages, table, sequence, slot, k, chunk)
    return _append("pask_append_bounds", pages, table, sequence, slot, k, None, chunk)


def _append(
    name: str,
    pages: Pages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    *more: int,
) -> None:
    rows, kv_heads, head_dim = k.shape
    if slot.shape != (rows, kv_heads) or table.shape[1] != kv_heads or len(sequence) != rows:
        raise ValueError(f"slots {tuple(slot.shape)} and table do not fit keys {tuple(k.shape)}")
    table, sequence, slot = (ready(x, torch.int32) for x in (table, sequence, slot))
    k = ready(k, torch.float32)
    v = None if v is None else ready(v, torch.float32)
    operation(name)(
        (
            *(rows, head_dim, k.data_ptr(), 0 if v is None else v.data_ptr()),
            *(sequence.data_ptr(), slot.data_ptr()),
            *(*pages_arguments(pages), *table_arguments(table), *more),
        )
    )
