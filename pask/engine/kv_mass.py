"""The attention that a step paid, told by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pask.engine.kv_plan import Plan
from pask.engine.kv_seat import KIND_POOL

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings


def stacked(masses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each layer's [rows, kv_heads, width] as one [layers, rows, kv_heads, width], zeros behind."""
    width = max(mass.shape[2] for mass in masses)
    if all(mass.shape[2] == width for mass in masses):
        return torch.stack(list(masses))
    together = torch.zeros(len(masses), *masses[0].shape[:2], width)
    for layer, mass in enumerate(masses):
        together[layer, :, :, : mass.shape[2]] = mass
    return together


def mass_by_token(
    store: Holdings, plan: Plan, runs: Sequence[int], masses: torch.Tensor
) -> dict[int, torch.Tensor]:
    """`Step.mass` of each of `runs`, which ascend.

    masses: [layers, rows, kv_heads, width], the probabilities of these runs' rows; their columns
    are the slots that a row sees: region after region, in slot order.
    """
    slices = [plan.rows(run) for run in runs]
    rows = np.concatenate([np.arange(some.start, some.stop) for some in slices])
    ends = [int(plan.positions[some.stop - 1]) + 1 for some in slices]
    most = max(ends)
    # One column more takes what stands behind a row's last slot.
    shape = store.shape
    mass = torch.zeros(shape.layers, len(rows), shape.kv_heads, most + 1)
    offset = np.zeros((shape.layers, len(rows)), dtype=np.int64)
    for kind in KIND_POOL:
        if kind not in plan.stop or kind == "summary":
            continue
        stop, start = plan.stop[kind][rows].T, np.zeros_like(offset)
        if kind == "recent" and plan.recent_start is not None:
            start = plan.recent_start[rows].T
        count = stop - start
        width = int(count.max(initial=0))
        if not width:
            continue
        seen = _tokens(store, plan.seats[rows], kind, start, width)
        if (count < width).any():
            behind = np.arange(width) >= count[:, :, None]
            np.copyto(seen, most, where=behind[:, :, None])
        begin = int(offset[0, 0])
        if (offset == begin).all() and begin + width <= masses.shape[3]:
            paid = masses[..., begin : begin + width]
        else:
            columns = np.minimum(offset[:, :, None] + np.arange(width), masses.shape[3] - 1)
            index = torch.from_numpy(columns)[:, :, None].expand(seen.shape)
            paid = masses.gather(3, index)
        mass.scatter_add_(3, torch.from_numpy(seen), paid)
        offset += count
    found, at = {}, 0
    for run, some, end in zip(runs, slices, ends, strict=True):
        rows_of_run = mass[:, at : at + some.stop - some.start, :, :end]
        found[run] = rows_of_run[:, 0] if rows_of_run.shape[1] == 1 else rows_of_run.sum(dim=1)
        at += some.stop - some.start
    return found


def _tokens(
    store: Holdings, seats: np.ndarray, kind: str, start: np.ndarray, width: int
) -> np.ndarray:
    """The tokens of slots start .. start + width ([layers, rows]) of the rows' seats, [layers,
    rows, kv_heads, width] int64."""
    pool = store.pool(kind)
    if kind == "recent":
        layers, rows = start.shape
        ring = store.rings[seats][None, :, None]
        slots = (start[:, :, None] + np.arange(width)) % ring
        page, place = store.seat_pages.at(kind, seats.repeat(width), slots.reshape(layers, -1))
        named = pool.tokens[page, place].reshape(layers, rows, width, -1).swapaxes(2, 3)
        return np.array(named, dtype=np.int64)
    pages = store.pages_for(width, kind)
    ids = store.seat_pages.tables[kind].host[:, seats, :, :pages]
    named = pool.tokens.take(ids.ravel(), axis=0).reshape(*ids.shape[:3], -1)
    return named[..., :width].astype(np.int64)
