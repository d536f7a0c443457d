"""Sequences of the KV store that share pages, lose tokens, or are cut back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pask.engine.kv_evict import EvictionRefused
from pask.engine.kv_store import Run
from pask.methods.contract import Placement
from pask.methods.levels import Level
from tests.cpu.kv_stores import (
    BELOW,
    LOW4,
    SHAPE,
    SLOT,
    feed,
    fill,
    new_store,
    random_levels,
    row_numbers,
    rows,
    same,
)


def test_seats_that_share_a_prompt_do_not_touch_each_other() -> None:
    store, apart = new_store(), new_store()
    seats = [store.open(9) for _ in range(3)]
    fill(store, seats)
    assert store.pool("high").used == 3 * SHAPE.heads
    lone = [apart.open(9) for _ in range(3)]
    for seat in lone:
        fill(apart, seat)
    fork = store.fork(seats[1])
    lone.append(apart.fork(lone[1]))
    for n in range(5):
        for seat, other in zip((*seats, fork), lone, strict=True):
            numbers = row_numbers(1, 10 * n + seat.id)
            out, _ = feed(store, [Run(seat, None, 1)], numbers)
            assert torch.equal(out, feed(apart, [Run(other, None, 1)], numbers)[0])
        store.check()
    assert store.pool("high").used == (2 + 4 * 2) * SHAPE.heads  # the last page was shared, too
    for seat in (*seats, fork):
        store.free(seat)
    store.check()
    assert store.pool("high").used == 0


def test_a_fork_has_a_ring_of_its_own() -> None:
    store = new_store()
    seat = store.open(6, recent=6, levels=LOW4)
    fill(store, seat)
    low = np.full((1, 2), Level.LOW4, dtype=np.int8)
    for n in range(11):
        feed(store, [Run(seat, low)], row_numbers(1, n))
    fork = store.fork(seat)
    before = store.dense(fork, 1)
    for n in range(5):
        feed(store, [Run(seat, low)], row_numbers(1, 100 + n))
    store.check()
    after = store.dense(fork, 1)
    assert before.keys() == after.keys() == {"high", "low4", "recent"}
    for kind, parts in before.items():
        assert all(map(torch.equal, parts, after[kind]))


def test_a_shared_page_that_has_room_again_is_copied_first() -> None:
    """A full page is written to again after an eviction, and after a cut."""
    store = new_store()
    evicting = store.open(8)
    fill(store, evicting)
    fork = store.fork(evicting)
    feed(store, [Run(evicting, None, 1)], row_numbers(1, 0))  # it has looked at its last pages
    store.evict(evicting, np.full((2, 3, 2), [[[7, 8]]]))
    before = store.dense(fork, 0)["high"]
    feed(store, [Run(evicting, None, 1)], row_numbers(1, 1))
    store.check()
    assert all(map(torch.equal, before, store.dense(fork, 0)["high"]))

    cutting = store.open(6)
    fill(store, cutting)
    feed(store, [Run(cutting, None, 3)], row_numbers(3, 2))
    fork = store.fork(cutting)
    feed(store, [Run(cutting, None, 1)], row_numbers(1, 3))
    store.truncate(cutting, 1)
    before = store.dense(fork, 0)["high"]
    feed(store, [Run(cutting, None, 1)], row_numbers(1, 4))
    store.check()
    assert all(map(torch.equal, before, store.dense(fork, 0)["high"]))


def test_the_last_slot_moves_into_the_hole() -> None:
    store = new_store()
    seat = store.open(9)
    fill(store, seat)
    store.evict(seat, torch.tensor([[[2], [8], [0]], [[-1], [-1], [-1]]]))
    store.check()
    first = store.dense(seat, 0)["high"][0]
    assert first.tolist() == [
        [0, 1, 8, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert store.dense(seat, 1)["high"][0].shape == (3, 9)
    assert store.pool("high").used == 3 * (2 + 3)  # the emptied page is free
    assert store.resident_bytes(seat)["prompt"] == {"high": (8 + 9) * SLOT // 2}


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ([[[3], [3], [9]], [[1], [1], [1]]], "token 9 is not at HIGH in layer 0, kv head 2"),
        ([[[3, 3]] * 3] * 2, "twice"),
        ([[[3, 2], [3, -1], [3, 2]]] * 2, "as many tokens"),
        ([[[3]] * 2] * 2, r"must be \[2, 3, n\]"),
    ],
)
def test_an_eviction_that_makes_no_sense_changes_nothing(tokens: list, told: str) -> None:
    store = new_store()
    seat = store.open(9)
    fill(store, seat)
    with pytest.raises(ValueError, match=told):
        store.evict(seat, np.array(tokens))
    store.check()
    assert store.dense(seat, 0)["high"][0].tolist() == [list(range(9))] * 3


def test_one_refusal_among_several_seats_changes_none_of_them() -> None:
    store = new_store()
    seats = [store.open(9), store.open(6)]
    for seat in seats:
        fill(store, seat)
    one, two = np.full((2, 3, 1), 4), np.array([[[5, 0]] * 3, [[6, 0]] * 3])
    with pytest.raises(EvictionRefused, match="token 6 is not at HIGH in layer 1") as refused:
        store.evict_together(seats, [one, two])
    assert refused.value.number == 1
    assert [store.dense(seat, 1)["high"][0].shape[1] for seat in seats] == [9, 6]
    assert not any(seat.evicted for seat in seats)
    store.evict_together(seats, [one, two - 1])  # 5 0 as 4 -1: one token of the second in layer 0
    store.check()
    assert store.dense(seats[0], 0)["high"][0].tolist() == [[0, 1, 2, 3, 8, 5, 6, 7]] * 3
    assert store.dense(seats[1], 0)["high"][0].tolist() == [[0, 1, 2, 3, 5]] * 3
    assert store.dense(seats[1], 1)["high"][0].tolist() == [[0, 1, 2, 3, 4]] * 3


def test_what_a_freed_slot_held_is_not_there() -> None:
    store = new_store()
    seat = store.open(9)
    fill(store, seat)
    store.evict(seat, np.full((2, 3, 1), 7))  # 8, in the last slot, comes in its place
    store.evict(seat, np.full((2, 3, 1), 0))
    store.check()
    assert store.dense(seat, 1)["high"][0].tolist() == [[8, 1, 2, 3, 4, 5, 6]] * 3
    store.evict(seat, np.full((2, 3, 1), 6))  # itself the last: its slot goes on naming it
    for gone in (6, 7, 9, 2**40 + 1):
        with pytest.raises(ValueError, match="is not at HIGH"):
            store.evict(seat, np.full((2, 3, 1), gone))
    store.evict(seat, np.array([[[8, 3, 1]] * 3] * 2))
    store.check()
    assert store.dense(seat, 0)["high"][0].sort().values.tolist() == [[2, 4, 5]] * 3


def test_after_a_cut_all_goes_on_as_if_nothing_had_been_fed() -> None:
    levels, numbers = random_levels(30, BELOW, 5), row_numbers(30, 6)
    kind = {"recent": 4, "levels": LOW4 | {Level.LOW2}, "ring_slots": 4 + 30 + 1}
    store, straight = new_store(), new_store()
    cut, never = store.open(11, **kind), straight.open(11, **kind)
    fill(store, cut)
    fill(straight, never)
    feed(store, [Run(cut, levels[:7])], rows(numbers, slice(0, 7)))
    feed(store, [Run(cut, levels[7:25])], rows(numbers, slice(7, 25)))
    feed(straight, [Run(never, levels[:13])], rows(numbers, slice(0, 13)))
    store.truncate(cut, 13)
    store.check()
    assert same(store, cut, straight, never)
    wrong, good = row_numbers(17, 99), rows(numbers, slice(13, 30))
    feed(store, [Run(cut, levels[13:30][::-1].copy())], wrong)
    store.truncate(cut, 3)  # into the step before the last, too
    feed(store, [Run(cut, levels[3:13])], rows(numbers, slice(3, 13)))
    out, held = feed(store, [Run(cut, levels[13:30])], good)
    expected = feed(straight, [Run(never, levels[13:30])], good)
    assert torch.equal(out, expected[0])
    assert held.tolist() == expected[1].tolist()
    store.check()
    assert same(store, cut, straight, never)


def test_a_cut_knows_nothing_of_the_seat_that_was_there_before() -> None:
    """A seat whose prompt alone is low, where a seat with low decoded tokens was freed."""
    store = new_store()
    before = store.open(9, recent=0, levels=LOW4, ring_slots=16)
    fill(store, before)
    feed(store, [Run(before, np.full((9, 2), Level.LOW4, dtype=np.int8))], row_numbers(9, 0))
    store.free(before)
    seat = store.open(9, levels=LOW4, acts=False)
    assert seat.id == before.id
    tokens = torch.arange(9).expand(3, -1)
    fill(store, seat, Placement({Level.HIGH: tokens[:, :4], Level.LOW4: tokens[:, 4:]}))
    feed(store, [Run(seat, None, 6)], row_numbers(6, 1))
    store.truncate(seat, 2)
    store.check()
    held = store.dense(seat, 0)
    assert held["low4"][0].shape == (3, 5)
    assert held["high"][0].shape == (3, 4 + 2)


def test_no_cut_goes_behind_an_eviction_or_what_the_ring_has_lost() -> None:
    store = new_store()
    seat = store.open(5, recent=2, levels=LOW4)  # a ring of 4 slots
    fill(store, seat)
    low = np.full((2, 2), Level.LOW4, dtype=np.int8)
    for n in range(3):
        feed(store, [Run(seat, low)], row_numbers(2, n))
    with pytest.raises(ValueError, match="ring has lost"):
        store.truncate(seat, 4)
    store.truncate(seat, 5)
    store.check()
    store.evict(seat, np.zeros((2, 3, 1), dtype=np.int64))
    for decoded in (4, 6):
        with pytest.raises(ValueError, match="cannot cut"):
            store.truncate(seat, decoded)
