"""The attention that a step paid, told by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pask.engine.kv_plan import Plan
from pask.engine.kv_seat import KIND_POOL, Seat

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
    store: Holdings, plan: Plan, run: int, masses: torch.Tensor, first: int
) -> torch.Tensor:
    """`Step.mass` from probabilities [layers, rows, kv_heads, width], whose columns are the slots
    that a row sees: region after region, in slot order; the run's begin at row `first`."""
    seat, rows = plan.runs[run].seat, plan.rows(run)
    tokens = int(plan.positions[rows.stop - 1]) + 1
    # One column more takes what stands behind a layer's last slot.
    mass = torch.zeros(store.shape.layers, store.shape.kv_heads, tokens + 1)
    for row in range(rows.start, rows.stop):
        probabilities = masses[:, first + row - rows.start]
        offset = np.zeros(store.shape.layers, dtype=np.int64)
        for kind in KIND_POOL:
            if kind not in plan.stop or kind == "summary":
                continue
            stop, start = plan.stop[kind][row], np.zeros_like(offset)
            if kind == "recent" and plan.recent_start is not None:
                start = plan.recent_start[row]
            count = stop - start
            width = int(count.max(initial=0))
            if not width:
                continue
            seen = _tokens(store, seat, kind, start, width)
            if (count == width).all() and (offset == offset[0]).all():
                paid = probabilities[:, :, int(offset[0]) : int(offset[0]) + width]
            else:
                behind = np.arange(width) >= count[:, None]
                seen[np.broadcast_to(behind[:, None], seen.shape)] = tokens
                columns = np.minimum(offset[:, None] + np.arange(width), masses.shape[3] - 1)
                index = torch.from_numpy(columns)[:, None].expand(seen.shape)
                paid = probabilities.gather(2, index)
            mass.scatter_add_(2, torch.from_numpy(seen), paid)
            offset += count
    return mass[:, :, :tokens]


def _tokens(store: Holdings, seat: Seat, kind: str, start: np.ndarray, width: int) -> np.ndarray:
    """The tokens of slots start .. start + width of each layer, [layers, kv_heads, width] int64."""
    pool = store.pool(kind)
    if kind == "recent":
        slots = (start[:, None] + np.arange(width)) % seat.ring_slots
        page, place = store.seat_pages.at(kind, np.full(width, seat.id), slots)
        named = pool.tokens[page, place].transpose(0, 2, 1)
        return np.array(named, dtype=np.int64)
    pages = store.pages_for(width, kind)
    ids = store.seat_pages.tables[kind].host[:, seat.id, :, :pages]
    named = pool.tokens.take(ids.ravel(), axis=0).reshape(*ids.shape[:2], -1)
    return named[:, :, :width].astype(np.int64)
