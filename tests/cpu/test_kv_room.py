"""Pages of the KV store that are promised, missing, or held by the wrong ones."""

from __future__ import annotations

import numpy as np
import pytest

from pask.engine.kv_store import KVShape, KVStore, OutOfPages, Run
from pask.methods.levels import Level
from tests.cpu.kv_stores import (
    LOW4,
    SHAPE,
    feed,
    fill,
    new_store,
    row_numbers,
)


def test_promised_pages_are_there_when_they_are_needed() -> None:
    store = KVStore.sized(SHAPE, 32, seats=3, max_tokens=64, page_slots=4)
    first, second = store.open(6), store.open(6)
    assert store.capacity(Level.HIGH) == 32
    assert store.room_for({Level.HIGH: 32})
    store.reserve(first, {Level.HIGH: 20})
    assert store.room_for({Level.HIGH: 12})
    assert not store.room_for({Level.HIGH: 13})
    fill(store, first)  # two pages a head of the five promised
    store.check()
    assert store.room_for({Level.HIGH: 12})
    assert not store.room_for({Level.HIGH: 13})
    fill(store, second)
    with pytest.raises(OutOfPages):
        feed(store, [Run(second, None, 7)], row_numbers(7, 0))
    store.check()
    assert (second.decoded, store.pool("high").used) == (0, 4 * SHAPE.heads)
    feed(store, [Run(first, None, 14)], row_numbers(14, 0))
    store.check()
    store.free(first)
    assert store.room_for({Level.HIGH: 24})


def test_what_eviction_frees_stays_promised() -> None:
    store = KVStore.sized(SHAPE, 16, seats=2, max_tokens=64, page_slots=4)
    seat = store.open(8)
    store.reserve(seat, {Level.HIGH: 16})
    fill(store, seat)
    for n in range(20):
        feed(store, [Run(seat, None, 1)], row_numbers(1, n))
        store.evict(seat, np.full((2, 3, 1), 8 + n))
        store.check()
        assert not store.room_for({Level.HIGH: 1})


def test_a_promise_covers_the_copy_of_a_shared_page() -> None:
    store = KVStore.sized(SHAPE, 24, seats=3, max_tokens=64, page_slots=4)
    seats = [store.open(6), store.open(6)]
    fill(store, seats)
    for seat in seats:
        store.reserve(seat, {Level.HIGH: 4})  # one page more a head, and a copy of the last one
    assert not store.room_for({Level.HIGH: 1})
    for seat in seats:
        feed(store, [Run(seat, None, 4)], row_numbers(4, 0))
        store.check()
    assert store.pool("high").used == 5 * SHAPE.heads  # the second had nobody to copy for


def test_nothing_changes_where_one_pool_is_too_small() -> None:
    store = KVStore(SHAPE, {Level.HIGH: 60, Level.LOW4: 6}, seats=2, max_tokens=64, page_slots=4)
    seat = store.open(4, levels=LOW4)
    fill(store, seat)
    levels = np.full((4, 2), Level.LOW4, dtype=np.int8)
    feed(store, [Run(seat, levels)], row_numbers(4, 0))
    with pytest.raises(OutOfPages, match="LOW4"):
        feed(store, [Run(seat, levels)], row_numbers(4, 0))
    store.check()
    assert seat.decoded == 4


def test_seats_and_lengths_are_limited() -> None:
    store = KVStore.sized(SHAPE, 64, seats=1, max_tokens=8, page_slots=4)
    with pytest.raises(ValueError, match="9 prompt tokens"):
        store.open(9)
    with pytest.raises(ValueError, match="no low pages for LOW4"):
        store.open(4, levels=LOW4)
    seat = store.open(6)
    with pytest.raises(ValueError, match="all 1 seats are taken"):
        store.open(4)
    fill(store, seat)
    with pytest.raises(ValueError, match="9 tokens in a sequence"):
        store.begin([Run(seat, None, 3)])
    with pytest.raises(ValueError, match="at least one token"):
        Run(seat, None, 0)


def test_shares_of_a_capacity() -> None:
    store = KVStore.sized(
        KVShape(1, 2, 32), 100, {Level.HIGH: 0.2, Level.LOW4: 0.5}, seats=1, max_tokens=100
    )
    assert store.pool_bytes() == {
        Level.HIGH: (0, 2 * 2 * 16 * 128),  # 20 tokens are two pages of 16, for 2 heads
        Level.LOW4: (0, 4 * 2 * 16 * 40),
    }


def test_check_finds_a_lost_page_a_double_token_and_a_bad_number() -> None:
    for harm in ("references", "tokens", "numbers"):
        store = new_store()
        seat = store.open(6)
        fill(store, seat)
        store.check()
        pool = store.pool("high")
        page = store.seat_pages.tables["high"].host[1, seat.id, 2, 1]
        if harm == "references":
            pool.references[page] = 2
        elif harm == "tokens":
            pool.tokens[page, 1] = 0
        else:
            pool.high.data[page, 1, 1, 5] = float("nan")
        with pytest.raises(AssertionError):
            store.check()
