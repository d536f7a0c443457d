"""Removing tokens from a seat's HIGH region, without leaving holes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pask.engine.kv_seat import Seat

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings


def remove(store: Holdings, seat: Seat, tokens: np.ndarray) -> None:
    """Evict `tokens` [layers, kv_heads, n] int64, -1 where none, as `KVStore.evict` says.

    A layer of m tokens that loses n of them keeps the slots 0 .. m-n-1: the survivors among the
    last n slots fill the holes before them, the first survivor the first hole.
    """
    shape, pool = store.shape, store.pool("high")
    if tokens.ndim != 3 or tokens.shape[:2] != (shape.layers, shape.kv_heads):
        raise ValueError(f"tokens to evict must be [{shape.layers}, {shape.kv_heads}, n]")
    # The pool's numbers are 32 bit too: those of one kind are compared many times faster.
    tokens = np.minimum(tokens, store.max_tokens).astype(np.int32)
    tokens = np.sort(tokens, axis=2)[:, :, ::-1]
    named = tokens >= 0  # -1 stands behind
    lost = named.sum(axis=2)
    if (lost != lost[:, :1]).any():
        raise ValueError("the kv heads of a layer must lose as many tokens each")
    if ((tokens[:, :, 1:] == tokens[:, :, :-1]) & named[:, :, 1:]).any():
        raise ValueError("a token is to be evicted twice")
    lost = lost[:, 0]
    most = int(lost.max(initial=0))
    if not most:
        return
    tokens, named = tokens[:, :, :most], named[:, :, :most]
    old = store.counts["high"][seat.id].copy()
    new = old - lost
    holes = _slots(store, seat, tokens, named, old)

    # Pairs of (survivor among the last slots, hole before them), as many in a head as there are.
    behind = np.where(named, new[:, None, None] + np.arange(most), -1)
    survives = named & ~(behind[:, :, :, None] == holes[:, :, None, :]).any(axis=3)
    before = named & (holes < new[:, None, None])
    layer, head, pair = np.nonzero(np.sort(survives, axis=2)[:, :, ::-1])
    if len(layer):
        source = _compact(behind, survives)[layer, head, pair]
        target = _compact(holes, before)[layer, head, pair]
        _move(store, seat, layer, head, source, target)

    pages = -(-old // pool.page_slots), -(-new // pool.page_slots)
    store.prompt_high[seat.id] -= (named & (tokens < seat.prompt_tokens)).sum(axis=(1, 2))
    store.counts["high"][seat.id] = new
    if (pages[1] < pages[0]).any():
        store.seat_pages.cut("high", seat.id, pages[0], pages[1])
    seat.evicted = True
    seat.cut_from = seat.decoded
    seat.owns_tails = not seat.shares


def _slots(
    store: Holdings, seat: Seat, tokens: np.ndarray, named: np.ndarray, used: np.ndarray
) -> np.ndarray:
    """The slots of the named tokens, [layers, kv_heads, n], -1 elsewhere."""
    pool = store.pool("high")
    pages = int(store.pages_for(int(used.max(initial=0))))
    ids = store.seat_pages.tables["high"].host[:, seat.id, :, :pages]
    held = pool.tokens.take(ids.ravel(), axis=0).reshape(*ids.shape[:2], 1, -1)
    found = held == tokens[:, :, :, None]
    # The first that is found: what a free slot still names lies behind the slots in use.
    slots = found.argmax(axis=3)
    there = found.reshape(slots.size, -1)[np.arange(slots.size), slots.ravel()]
    missing = named & ~(there.reshape(slots.shape) & (slots < used[:, None, None]))
    if missing.any():
        layer, head, n = np.argwhere(missing)[0]
        raise ValueError(
            f"token {tokens[layer, head, n]} is not at HIGH in layer {layer}, kv head {head}"
        )
    return np.where(named, slots, -1)


def _compact(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The wanted values first, ascending, along the last axis."""
    if values.shape[2] == 1:
        return values
    far = np.iinfo(np.int64).max
    return np.sort(np.where(wanted, values, far), axis=2)


def _move(
    store: Holdings,
    seat: Seat,
    layer: np.ndarray,
    head: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
) -> None:
    pool, host = store.pool("high"), store.seat_pages.tables["high"].host
    slots, data = pool.page_slots, pool.high.data
    if seat.shares:
        store.seat_pages.own_entries("high", seat.id, layer, head, target // slots)
    ends = np.stack((source, target))
    page, place = host[layer, seat.id, head, ends // slots].astype(np.int64), ends % slots
    pool.tokens[page[1], place[1]] = pool.tokens[page[0], place[0]]
    keys = page * (2 * slots) + place  # as rows of head_dim numbers; a value lies a page's slots on
    at = torch.from_numpy(np.concatenate((keys, keys + slots), axis=1)).to(data.device)
    numbers = data.view(-1, data.shape[3])
    numbers.index_copy_(0, at[1], numbers.index_select(0, at[0]))
