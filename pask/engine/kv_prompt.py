"""A layer's prompt in the store: rounded, measured, and put where a method wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels import append_bounds, append_low, put_channel
from pask.engine.kv_seat import CHANNEL2, Seat
from pask.engine.kv_tables import Growth
from pask.methods.contract import Placement
from pask.methods.levels import CHANNEL_GROUP, Level

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings


def put_prompt(
    store: Holdings,
    seats: Sequence[Seat],
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    placement: Placement | None,
) -> None:
    """Write a layer's prompt, [kv_heads, P, head_dim] in the store's dtype, for the first of
    `seats` and let the others hold the same pages."""
    prompt = keys.shape[1]
    tokens = None if placement is None else placement.tokens
    by_level = {Level.HIGH: None} if tokens is None else dict(tokens)
    counts = {level: prompt if at is None else at.shape[1] for level, at in by_level.items()}
    first, others = seats[0], seats[1:]
    for level in counts:
        if level is not Level.HIGH and any(level not in seat.levels for seat in seats):
            raise ValueError(f"{level.name} is not among the seat's levels")
    if first.kind(Level.LOW2) == CHANNEL2 and counts.get(Level.LOW2, 0) % CHANNEL_GROUP:
        raise ValueError(f"{counts[Level.LOW2]} LOW2 tokens are not in groups of {CHANNEL_GROUP}")
    if any(_make(seat) != _make(first) for seat in others):
        raise ValueError("seats of different make cannot share a copy")
    measured = [seat.id for seat in seats if seat.has_statistics]
    if measured:
        store.statistics.measure(layer, measured, keys)
    _take_pages(store, first, layer, counts)
    for level, at in by_level.items():
        if not counts[level]:
            continue
        if at is None:
            named, chosen = np.broadcast_to(np.arange(prompt), keys.shape[:2]), (keys, values)
        else:
            named = at.cpu().numpy()
            index = at.to(keys.device)[:, :, None].expand(-1, -1, keys.shape[2])
            chosen = keys.gather(1, index), values.gather(1, index)
        if level is Level.HIGH:
            _put_high(store, first, layer, *chosen, named)
        else:
            kind = first.kind(level)
            if kind == CHANNEL2:
                _put_channel(store, first, layer, *chosen)
            else:
                _put_low(store, first, layer, kind, *chosen)
            _name(store, kind, first, layer, named)
    for seat in seats:
        _count(store, seat, layer, counts)
        if others:
            seat.shares, seat.owns_tails = True, False
    for kind, pages in store.held(first).items():
        for seat in others:
            store.seat_pages.share(kind, first.id, seat.id, layer, int(pages[layer]))


def _make(seat: Seat) -> tuple[object, ...]:
    """What decides what is stored for a placement."""
    return seat.choice, seat.has_statistics, seat.channel_keys


def _take_pages(store: Holdings, seat: Seat, layer: int, counts: dict[Level, int]) -> None:
    kinds = {seat.kind(level): n for level, n in counts.items()}
    if seat.choice is not None:
        kinds["summary"] = -(-kinds.get("high", 0) // seat.choice.chunk)
    growths = []
    for kind, slots in kinds.items():
        new = np.zeros((1, store.shape.layers), dtype=np.int64)
        new[0, layer] = store.pages_for(slots, kind)
        growths.append(Growth(kind, np.array([seat.id]), np.zeros_like(new), new))
    store.seat_pages.grow(growths)
    store.seat_pages.sync()


def _count(store: Holdings, seat: Seat, layer: int, counts: dict[Level, int]) -> None:
    for level, slots in counts.items():
        kind = seat.kind(level)
        store.counts[kind][seat.id, layer] = slots
        if level is Level.HIGH:
            store.prompt_high[seat.id, layer] = slots * store.shape.kv_heads
        else:
            store.prompt_low[kind][seat.id, layer] = slots
    seat.layers_placed += 1


def _put_high(
    store: Holdings,
    seat: Seat,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    named: np.ndarray,
) -> None:
    """Whole pages at once: the free slots of the last one are written too, with zeros."""
    pool = store.pool("high")
    heads, count, head_dim = keys.shape
    pages = store.pages_for(count)
    ids = store.seat_pages.tables["high"].host[layer, seat.id, :, :pages].ravel()
    at = torch.from_numpy(ids.astype(np.int64)).to(keys.device)
    padded = keys.new_zeros(heads, pages * pool.page_slots, head_dim)
    for half, part in enumerate((keys, values)):
        padded[:, :count] = part
        pool.high.data[at, half] = padded.view(-1, pool.page_slots, head_dim)
    _name(store, "high", seat, layer, named)
    if seat.choice is not None:
        slots = torch.arange(count, dtype=torch.int32, device=keys.device)
        append_bounds(
            pool.high,
            store.seat_pages.tables["summary"].layer(layer),
            torch.full_like(slots, seat.id),
            slots[:, None].expand(-1, heads).contiguous(),
            keys.transpose(0, 1).float().contiguous(),
            seat.choice.chunk,
        )


def _put_low(
    store: Holdings,
    seat: Seat,
    layer: int,
    kind: str,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    heads, count, _ = keys.shape
    slots = torch.arange(count, dtype=torch.int32, device=keys.device)
    append_low(
        store.pool(kind).low,
        store.seat_pages.tables[kind].layer(layer),
        torch.full_like(slots, seat.id),
        slots[:, None].expand(-1, heads).contiguous(),
        keys.transpose(0, 1).float().contiguous(),
        values.transpose(0, 1).float().contiguous(),
        store.statistics.shift(layer) if seat.has_statistics else None,
    )


def _put_channel(
    store: Holdings, seat: Seat, layer: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    pages = store.pages_for(keys.shape[1], CHANNEL2)
    ids = store.seat_pages.tables[CHANNEL2].host[layer, seat.id, :, :pages].ravel()
    put_channel(
        store.pool(CHANNEL2).by_channel,
        torch.from_numpy(ids.astype(np.int64)).to(keys.device),
        keys.float().reshape(-1, CHANNEL_GROUP, keys.shape[2]),
        values.float().reshape(-1, CHANNEL_GROUP, values.shape[2]),
    )


def _name(store: Holdings, kind: str, seat: Seat, layer: int, named: np.ndarray) -> None:
    """Say which tokens, [kv_heads, n], lie in the first slots of a kind."""
    pool = store.pool(kind)
    heads, count = named.shape
    pages = store.pages_for(count, kind)
    padded = np.zeros((heads, pages * pool.page_slots), dtype=np.int32)
    padded[:, :count] = named
    ids = store.seat_pages.tables[kind].host[layer, seat.id, :, :pages]
    pool.tokens[ids] = padded.reshape(heads, pages, pool.page_slots)
