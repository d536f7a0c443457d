"""Removing tokens from seats' HIGH regions, without leaving holes.

All seats of a step are changed together: arrays are [seats, layers, kv_heads, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pask.engine.kv_seat import Seat

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings


class EvictionRefused(ValueError):
    """What was to be evicted cannot be; `number` says of which seat in the list."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


def remove(store: Holdings, seats: Sequence[Seat], tokens: Sequence[np.ndarray]) -> None:
    """Evict `tokens` ([layers, kv_heads, n] int64 of each seat, -1 where none), as
    `KVStore.evict` says; EvictionRefused, and nothing changed, where one of them cannot be.

    A layer of m tokens that loses n of them keeps the slots 0 .. m-n-1: the survivors among the
    last n slots fill the holes before them, the first survivor the first hole.
    """
    if not seats:
        return
    together = _together(store, tokens)
    named = together >= 0  # -1 stands behind
    lost = named.sum(axis=3)
    _refuse((lost != lost[:, :, :1]), "the kv heads of a layer must lose as many tokens each")
    again = (together[..., 1:] == together[..., :-1]) & named[..., 1:]
    _refuse(again, "a token is to be evicted twice")
    lost = lost[:, :, 0]
    most = int(lost.max(initial=0))
    if not most:
        return
    together, named = together[..., :most], named[..., :most]
    ids = np.array([seat.id for seat in seats])
    old = store.counts["high"][ids]
    new = old - lost
    holes = _slots(store, ids, together, named, old)

    # Pairs of (survivor among the last slots, hole before them), as many in a head as there are.
    first = new[:, :, None, None]
    behind = np.where(named, first + np.arange(most), -1)
    survives = named & ~(behind[..., :, None] == holes[..., None, :]).any(axis=4)
    before = named & (holes < first)
    number, layer, head, pair = np.nonzero(np.sort(survives, axis=3)[..., ::-1])
    if len(number):
        source = _compact(behind, survives)[number, layer, head, pair]
        target = _compact(holes, before)[number, layer, head, pair]
        _move(store, seats, number, layer, head, source, target)

    prompts = np.array([seat.prompt_tokens for seat in seats])[:, None, None, None]
    store.prompt_high[ids] -= (named & (together < prompts)).sum(axis=(2, 3))
    store.counts["high"][ids] = new
    size = store.pool("high").page_slots
    pages = -(-old // size), -(-new // size)
    for n in np.flatnonzero((pages[1] < pages[0]).any(axis=1)).tolist():
        store.seat_pages.cut("high", seats[n].id, pages[0][n], pages[1][n])
    for n in np.flatnonzero(lost.any(axis=1)).tolist():
        seat = seats[n]
        seat.evicted = True
        seat.cut_from = seat.decoded
        seat.owns_tails = not seat.shares


def _together(store: Holdings, tokens: Sequence[np.ndarray]) -> np.ndarray:
    """The seats' tokens in one array, descending, -1 behind."""
    shape = store.shape
    for number, some in enumerate(tokens):
        if some.ndim != 3 or some.shape[:2] != (shape.layers, shape.kv_heads):
            why = f"tokens to evict must be [{shape.layers}, {shape.kv_heads}, n]"
            raise EvictionRefused(number, why)
    width = max(some.shape[2] for some in tokens)
    # 32 bit, as the pool's numbers are: those of one kind are compared many times faster.
    together = np.full((len(tokens), shape.layers, shape.kv_heads, width), -1, dtype=np.int32)
    for number, some in enumerate(tokens):
        together[number, :, :, : some.shape[2]] = np.minimum(some, store.max_tokens)
    return np.sort(together, axis=3)[..., ::-1]


def _refuse(wrong: np.ndarray, why: str) -> None:
    if wrong.any():
        raise EvictionRefused(int(np.argwhere(wrong)[0][0]), why)


def _slots(
    store: Holdings, ids: np.ndarray, tokens: np.ndarray, named: np.ndarray, used: np.ndarray
) -> np.ndarray:
    """The slots of the named tokens, [seats, layers, kv_heads, n], -1 elsewhere."""
    pool = store.pool("high")
    pages = int(store.pages_for(int(used.max(initial=0))))
    table = store.seat_pages.tables["high"].host[:, ids, :, :pages].swapaxes(0, 1)
    held = pool.tokens.take(table.ravel(), axis=0).reshape(*table.shape[:3], 1, -1)
    found = held == tokens[..., None]
    # The first that is found: what a free slot still names lies behind the slots in use.
    slots = found.argmax(axis=4)
    there = found.reshape(slots.size, -1)[np.arange(slots.size), slots.ravel()]
    missing = named & ~(there.reshape(slots.shape) & (slots < used[:, :, None, None]))
    if missing.any():
        number, layer, head, n = np.argwhere(missing)[0]
        why = f"token {tokens[number, layer, head, n]} is not at HIGH in layer {layer}, kv head"
        raise EvictionRefused(int(number), f"{why} {head}")
    return np.where(named, slots, -1)


def _compact(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The wanted values first, ascending, along the last axis."""
    if values.shape[3] == 1:
        return values
    far = np.iinfo(np.int64).max
    return np.sort(np.where(wanted, values, far), axis=3)


def _move(
    store: Holdings,
    seats: Sequence[Seat],
    number: np.ndarray,
    layer: np.ndarray,
    head: np.ndarray,
    source: np.ndarray,
    target: np.ndarray,
) -> None:
    """Copy slots `source` of seats `number` to slots `target`, [n] each."""
    pool, host = store.pool("high"), store.seat_pages.tables["high"].host
    slots, data = pool.page_slots, pool.high.data
    for n, seat in enumerate(seats):
        if seat.shares:
            mine = number == n
            page = target[mine] // slots
            store.seat_pages.own_entries("high", seat.id, layer[mine], head[mine], page)
    ids = np.array([seat.id for seat in seats])[number]
    ends = np.stack((source, target))
    page, place = host[layer, ids, head, ends // slots].astype(np.int64), ends % slots
    pool.tokens[page[1], place[1]] = pool.tokens[page[0], place[0]]
    keys = page * (2 * slots) + place  # as rows of head_dim numbers; a value lies a page's slots on
    at = torch.from_numpy(np.concatenate((keys, keys + slots), axis=1)).to(data.device)
    numbers = data.view(-1, data.shape[3])
    numbers.index_copy_(0, at[1], numbers.index_select(0, at[0]))
