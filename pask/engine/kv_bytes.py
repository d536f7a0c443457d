"""What a seat's pages and statistics take, by stage and kind of region."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pask.engine.kv_seat import Seat

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings

Stages = dict[str, dict[str, int]]
"""Bytes by stage ("prompt", "decode") and kind of region ("high", "low4", "recent", ...)."""


def count_bytes(store: Holdings, seat: Seat) -> Stages:
    """The bytes of `KVStore.resident_bytes`."""
    heads = store.shape.kv_heads
    prompt, decode = {}, {}
    for kind, pages in store.held(seat).items():
        pool = store.pool(kind)
        if kind == "recent":
            pages = np.minimum(pages, least_ring_pages(store, seat))
        whole = int(pages.sum()) * heads * pool.page_bytes
        of_prompt = _prompt_slots(store, seat, kind) * pool.slot_bytes
        if of_prompt:
            prompt[kind] = of_prompt
        if whole > of_prompt:
            decode[kind] = whole - of_prompt
    statistics = statistics_bytes(store, seat)
    if statistics:
        prompt["statistics"] = statistics
    return {"prompt": prompt, "decode": decode}


def statistics_bytes(store: Holdings, seat: Seat) -> int:
    """Center and spread of every key channel, where the seat has them."""
    if not seat.has_statistics:
        return 0
    return 2 * store.shape.heads * store.shape.head_dim * store.statistics.center.element_size()


def least_ring_pages(store: Holdings, seat: Seat) -> int:
    """Pages of the ring that feeding one token a step asks for."""
    return min(store.pages_for(seat.recent + 1), seat.ring_slots // store.page_slots)


def _prompt_slots(store: Holdings, seat: Seat, kind: str) -> int:
    """Slots of all layers and kv heads that hold prompt tokens, or summaries of them."""
    if kind == "high":
        return int(store.prompt_high[seat.id].sum())
    if kind == "summary":
        assert seat.choice is not None
        kept = store.prompt_high[seat.id] // store.shape.kv_heads
        return int((-(-kept // seat.choice.chunk)).sum()) * store.shape.kv_heads
    if kind == "recent":
        return 0
    return int(store.prompt_low[kind][seat.id].sum()) * store.shape.kv_heads
