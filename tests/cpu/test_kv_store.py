"""The KV store: bytes counted by hand, runs against single steps, sharing, promises, cuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kv_stores import (
    SHAPE,
    feed,
    fill,
    new_store,
    prompt_numbers,
    random_levels,
    row_numbers,
    rows,
    same,
)

from pask.engine.kv_store import KVShape, KVStore, OutOfPages, Run
from pask.errors import PaskError
from pask.methods.contract import Placement
from pask.methods.levels import Level

SLOT = 2 * 2 * 3 * 32 * 2  # all layers' bytes of one HIGH slot: key and value, 3 heads of 32
LOW4 = frozenset({Level.LOW4})
BELOW = (Level.HIGH, Level.LOW4, Level.LOW2, Level.RELEASE)


def kept(count: int, prompt: int) -> torch.Tensor:
    """`count` of the tokens in each kv head, not the same ones."""
    return torch.stack(
        [torch.arange(prompt).roll(head)[:count].sort().values for head in range(SHAPE.kv_heads)]
    )


# Bytes


@pytest.mark.parametrize(
    ("prompt", "decoded", "slots"),
    [(16, 0, 16), (16, 1, 32), (15, 0, 16), (15, 1, 16), (15, 2, 32), (1, 0, 16), (20, 12, 32)],
)
def test_bytes_at_page_boundaries(prompt: int, decoded: int, slots: int) -> None:
    store = new_store(page=16)
    seat = store.open(prompt)
    fill(store, seat)
    held = [feed(store, [Run(seat, None, 1)], row_numbers(1, n))[1] for n in range(decoded)]
    assert store.full_bytes(prompt, decoded) == slots * SLOT
    assert store.full_prompt_bytes(prompt) == prompt * SLOT
    stages = store.resident_bytes(seat)
    assert stages["prompt"] == {"high": prompt * SLOT}
    assert stages["decode"] == ({"high": (slots - prompt) * SLOT} if slots > prompt else {})
    assert store.resident_total(seat) == slots * SLOT
    assert store.pool_bytes()[Level.HIGH][0] == slots * SLOT
    assert not held or held[-1].tolist() == [slots * SLOT]


def test_bytes_of_every_kind_of_region() -> None:
    store = new_store()
    seat = store.open(20, recent=5, levels=LOW4)
    tokens = kept(13, 20)
    fill(store, seat, Placement({Level.HIGH: tokens[:, :6], Level.LOW4: tokens[:, 6:]}))
    low = SLOT * 5 // 16
    statistics = 2 * 2 * 3 * 32 * 2  # center and spread, fp16
    assert store.resident_bytes(seat) == {
        "prompt": {"high": 6 * SLOT, "low4": 7 * low, "statistics": statistics},
        "decode": {"high": 2 * SLOT, "low4": 1 * low},  # free slots of the last pages
    }
    levels = np.full((9, 2), Level.LOW4, dtype=np.int8)
    for n in range(9):
        feed(store, [Run(seat, levels[n : n + 1])], row_numbers(1, n))
    # Three tokens (0 .. 9 - 1 - 5 - 1) have left: 10 low slots; six wait in a ring of two pages.
    assert store.resident_bytes(seat)["decode"] == {
        "high": 2 * SLOT,
        "low4": 5 * low,
        "recent": 8 * SLOT,
    }


def test_what_was_dropped_takes_no_bytes() -> None:
    store = new_store(page=16)
    seat = store.open(100)
    fill(store, seat, Placement.high(kept(11, 100)))
    for n in range(5):
        feed(store, [Run(seat, None, 1)], row_numbers(1, n))
    assert store.resident_bytes(seat) == {
        "prompt": {"high": 11 * SLOT},
        "decode": {"high": 5 * SLOT},
    }
    assert store.full_bytes(100, 5) == 112 * SLOT
    assert store.position(seat) == 105


def test_plain_low_keys_and_high_tokens_have_no_statistics() -> None:
    store = new_store()
    plain, high = store.open(8, levels=LOW4, normalise=False), store.open(8)
    fill(store, plain, Placement({Level.LOW4: kept(8, 8)}))
    fill(store, high)
    assert store.resident_bytes(plain)["prompt"] == {"low4": 8 * SLOT * 5 // 16}
    assert "statistics" not in store.resident_bytes(high)["prompt"]


# Runs


@pytest.mark.parametrize("cuts", [[1] * 23, [2, 1, 5, 7, 8], [23], [10, 13]])
@pytest.mark.parametrize("recent", [0, 3, 30])
def test_a_run_is_its_tokens_one_by_one(cuts: list[int], recent: int) -> None:
    """Outputs, stored bits and bytes; with a wrapped ring (the default) and a larger one."""
    levels, numbers = random_levels(23, BELOW, 1), row_numbers(23, 2)
    kind = {"recent": recent, "levels": LOW4 | {Level.LOW2}}
    tokens = kept(9, 12)
    at = Placement({Level.HIGH: tokens[:, :4], Level.LOW4: tokens[:, 4:]})
    alone, together = new_store(), new_store()
    one = alone.open(12, **kind)
    many = together.open(12, ring_slots=recent + max(cuts), **kind)
    fill(alone, one, at)
    fill(together, many, at)
    start = 0
    for length in cuts:
        these = slice(start, start + length)
        out, held = feed(together, [Run(many, levels[these])], rows(numbers, these))
        for n in range(length):
            row = slice(start + n, start + n + 1)
            expected = feed(alone, [Run(one, levels[row])], rows(numbers, row))
            assert torch.equal(out[:, n], expected[0][:, 0])
            assert held[n] == expected[1][0]
        start += length
        together.check()
        assert same(alone, one, together, many)


def test_a_row_does_not_depend_on_its_company() -> None:
    store = new_store()
    numbers = row_numbers(6, 3)
    seats = [
        store.open(10),
        store.open(7, recent=2, levels=LOW4),
        store.open(9, levels=LOW4, normalise=False),
    ]
    fill(store, seats[0])
    fill(store, seats[1], Placement({Level.LOW4: kept(5, 7)}))
    tokens = kept(9, 9)
    fill(store, seats[2], Placement({Level.LOW4: tokens[:, :5], Level.HIGH: tokens[:, 5:]}))
    forks = [store.fork(seat) for seat in seats]
    low = np.full((2, 2), Level.LOW4, dtype=np.int8)
    runs = [(seats[0], None), (seats[1], low), (seats[2], None)]
    out, _ = feed(store, [Run(seat, levels, 2) for seat, levels in runs], numbers)
    for n, fork in enumerate(forks):
        these = slice(2 * n, 2 * n + 2)
        alone, _ = feed(store, [Run(fork, runs[n][1], 2)], rows(numbers, these))
        assert torch.equal(out[:, these], alone)
    store.check()


def test_the_ring_refuses_what_it_cannot_hold() -> None:
    store = new_store()
    seat = store.open(4, recent=5, levels=LOW4)  # a ring of 8 slots
    fill(store, seat)
    assert seat.longest_run == 3
    with pytest.raises(ValueError, match="does not fit the seat's ring, 3 tokens do"):
        store.begin([Run(seat, np.full((9, 2), Level.RELEASE, dtype=np.int8))])
    feed(store, [Run(seat, None, 12)], row_numbers(12, 0))  # HIGH throughout: no ring needed
    for n in range(9):
        waiting = np.full((3, 2), Level.RELEASE, dtype=np.int8)
        feed(store, [Run(seat, waiting)], row_numbers(3, n))
    with pytest.raises(ValueError, match="does not fit the seat's ring"):
        store.begin([Run(seat, np.full((4, 2), Level.RELEASE, dtype=np.int8))])
    store.check()
    assert store.dense(seat, 0)["recent"][0][0].sort().values.tolist() == list(range(37, 43))
    assert store.open(4).longest_run == 128


def test_levels_that_a_seat_does_not_have_are_refused() -> None:
    store = new_store()
    plain, low = store.open(4), store.open(4, levels=LOW4)
    fill(store, plain)
    fill(store, low)
    with pytest.raises(ValueError, match="level is not among"):
        store.begin([Run(plain, np.full((1, 2), Level.RELEASE, dtype=np.int8))])
    with pytest.raises(ValueError, match="level is not among"):
        store.begin([Run(low, np.full((1, 2), Level.LOW2, dtype=np.int8))])
    with pytest.raises(ValueError, match="levels must be"):
        store.begin([Run(low, np.full((1, 3), Level.LOW4, dtype=np.int8))])
    with pytest.raises(ValueError, match="two runs"):
        store.begin([Run(low, None, 1), Run(low, None, 1)])
    store.check()


def test_steps_go_layer_by_layer_and_are_finished() -> None:
    store = new_store()
    seat = store.open(4)
    fill(store, seat)
    q, k, v = (part[0] for part in row_numbers(1, 0))
    step = store.begin([Run(seat, None, 1)])
    with pytest.raises(ValueError, match="layer 0 is next"):
        step.attend(1, q, k, v)
    with pytest.raises(ValueError, match="not finished"):
        store.begin([Run(seat, None, 1)])
    with pytest.raises(ValueError, match="not finished"):
        store.free(seat)
    step.attend(0, q, k, v)
    with pytest.raises(ValueError, match="after all its layers"):
        step.finish()
    step.attend(1, q, k, v)
    step.finish()
    with pytest.raises(ValueError, match="finished once"):
        step.finish()
    assert store.decoded(seat) == 1


# Prompts


def test_statistics_are_those_of_the_whole_prompt_as_stored() -> None:
    store = new_store()
    seat = store.open(30, levels=LOW4)
    fill(store, seat, Placement({Level.LOW4: kept(5, 30)}))
    for layer in range(SHAPE.layers):
        keys = prompt_numbers(30)[layer, 0].half().double().numpy()
        center, spread = store.statistics.center[layer], store.statistics.spread[layer]
        np.testing.assert_allclose(center[seat.id], keys.mean(axis=1), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(spread[seat.id], keys.std(axis=1), rtol=1e-3)
    store.free(seat)
    assert bool((store.statistics.center == 0).all() and (store.statistics.spread == 1).all())


def test_a_prompt_of_one_token_leaves_room_for_other_keys() -> None:
    store = new_store()
    seat = store.open(1, levels=LOW4)
    fill(store, seat)
    assert bool((store.statistics.spread[:, seat.id] == 2.0**-6).all())
    for n in range(3):
        q, k, v = row_numbers(1, n)
        low = np.full((1, 2), Level.LOW4, dtype=np.int8)
        out, _ = feed(store, [Run(seat, low)], (q, 100 * k, v))
        assert bool(torch.isfinite(out).all())
    store.check()
    _, keys, _ = store.dense(seat, 0)["low4"]
    exact = 100 * torch.stack([row_numbers(1, n)[1][0, 0] for n in range(2)], dim=1)
    assert float((keys - exact).abs().max()) < 2 * float(exact.abs().max()) / 15


def test_values_that_are_not_finite_are_told_from_those_that_do_not_fit() -> None:
    store = new_store()
    seat = store.open(4)
    keys, values = prompt_numbers(4)[0]
    with pytest.raises(PaskError, match=r"do not fit into torch\.float16"):
        store.add_prompt([seat], 0, keys * 1e6, values)
    keys[0, 0, 0] = float("nan")
    with pytest.raises(PaskError, match="not finite; check its weights"):
        store.add_prompt([seat], 0, keys, values)
    store.check()


def test_prompts_come_whole_and_layer_by_layer() -> None:
    store = new_store()
    seat = store.open(4)
    with pytest.raises(ValueError, match="layer 0 is next"):
        store.add_prompt([seat], 1, *prompt_numbers(4)[1])
    with pytest.raises(ValueError, match="5 tokens given, 4 expected"):
        store.add_prompt([seat], 0, *prompt_numbers(5)[0])
    store.add_prompt([seat], 0, *prompt_numbers(4)[0])
    with pytest.raises(ValueError, match="not stored in all layers"):
        store.begin([Run(seat, None, 1)])
    with pytest.raises(ValueError, match="LOW4 is not among"):
        store.add_prompt([seat], 1, *prompt_numbers(4)[1], Placement({Level.LOW4: kept(2, 4)}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_placing_a_prompt_again_is_a_prefill_of_its_own(dtype: torch.dtype) -> None:
    store, other = new_store(dtype=dtype), new_store(dtype=dtype)
    full = store.open(14)
    fill(store, full)
    feed(store, [Run(full, None, 3)], row_numbers(3, 0))
    tokens = kept(14, 14)
    mixed = Placement({Level.HIGH: tokens[:, :5], Level.LOW2: tokens[:, 5:12]})
    kind = {"recent": 2, "levels": frozenset({Level.LOW2})}
    placed, expected = store.place(full, [mixed, Placement()], **kind), other.open(14, **kind)
    for layer, at in enumerate((mixed, Placement())):
        other.add_prompt([expected], layer, *prompt_numbers(14)[layer], at)
    store.check()
    assert same(store, placed, other, expected)
    levels, numbers = random_levels(3, (Level.LOW2, Level.HIGH), 0), row_numbers(3, 1)
    runs = [Run(placed, levels)], [Run(expected, levels)]
    assert torch.equal(feed(store, runs[0], numbers)[0], feed(other, runs[1], numbers)[0])
    store.check()


def test_placing_whole_layers_takes_no_pages() -> None:
    store = new_store()
    full = store.open(14)
    fill(store, full)
    used = store.pool("high").used
    placed = store.place(full, None)
    assert store.pool("high").used == used
    assert store.resident_bytes(placed) == store.resident_bytes(full)
    store.evict(full, np.zeros((2, 3, 1), dtype=np.int64))
    store.check()
    assert store.dense(placed, 0)["high"][0][0].tolist() == list(range(14))
    with pytest.raises(ValueError, match="whole prompt at HIGH"):
        store.place(full, None)


# Sharing


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


# Eviction and cuts


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


# Room


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
    assert store.decoded(seat) == 4


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


# Check


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
