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
    tokens = np.sort(tokens, axis=2)[:, :, ::-1]  # the -1 behind
    named = tokens >= 0
    lost = named.sum(axis=2)
    if (lost != lost[:, :1]).any():
        raise ValueError("the kv heads of a layer must lose as many tokens each")
    if ((tokens[:, :, 1:] == tokens[:, :, :-1]) & named[:, :, 1:]).any():
        raise ValueError("a token is to be evicted twice")
    lost = lost[:, 0]
    if not lost.any():
        return
    tokens, named = tokens[:, :, : lost.max()], named[:, :, : lost.max()]
    old = store.counts["high"][seat.id]
    new = old - lost
    holes = _slots(store, seat, tokens, named, old)

    # Pairs of (survivor among the last slots, hole before them), as many in a head as there are.
    behind = np.where(named, new[:, None, None] + np.arange(tokens.shape[2]), -1)
    survives = named & ~(behind[:, :, :, None] == holes[:, :, None, :]).any(axis=3)
    before = named & (holes < new[:, None, None])
    source, target = _compact(behind, survives), _compact(holes, before)
    layer, head, pair = np.nonzero(np.sort(survives, axis=2)[:, :, ::-1])
    source, target = source[layer, head, pair], target[layer, head, pair]
    _move(store, seat, layer, head, source, target)

    pages = -(-old // pool.page_slots), -(-new // pool.page_slots)
    store.prompt_high[seat.id] -= (named & (tokens < seat.prompt_tokens)).sum(axis=(1, 2))
    store.counts["high"][seat.id] = new
    store.seat_pages.cut("high", seat.id, *pages)
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
    held = pool.tokens[ids].reshape(*ids.shape[:2], -1)
    live = np.arange(held.shape[2]) < used[:, None, None]
    held = np.where(live, held, -1)
    found = held[:, :, None] == np.where(named, tokens, -2)[:, :, :, None]
    slots = np.where(found.any(axis=3), found.argmax(axis=3), -1)
    missing = named & (slots < 0)
    if missing.any():
        layer, head, n = np.argwhere(missing)[0]
        raise ValueError(
            f"token {tokens[layer, head, n]} is not at HIGH in layer {layer}, kv head {head}"
        )
    return slots


def _compact(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The wanted values first, ascending, along the last axis."""
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
    if not len(layer):
        return
    if seat.shares:
        page = target // pool.page_slots
        store.seat_pages.own_entries("high", seat.id, layer, head, page)
    from_page, from_place = host[layer, seat.id, head, source // pool.page_slots], source
    to_page, to_place = host[layer, seat.id, head, target // pool.page_slots], target
    from_place, to_place = from_place % pool.page_slots, to_place % pool.page_slots
    pool.tokens[to_page, to_place] = pool.tokens[from_page, from_place]
    data = pool.high.data
    ids = (from_page, from_place, to_page, to_place)
    a, b, c, d = (torch.from_numpy(part.astype(np.int64)).to(data.device) for part in ids)
    data[c, :, d] = data[a, :, b]
