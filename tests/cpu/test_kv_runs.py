"""Steps of the KV store: runs against single tokens, rings, mass, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pask.engine.kv_store import KVStore, Run, Step
from pask.methods.contract import Placement
from pask.methods.levels import Level
from tests.cpu.kv_stores import (
    BELOW,
    LOW4,
    SHAPE,
    feed,
    fill,
    kept,
    new_store,
    random_levels,
    row_numbers,
    rows,
    same,
)


@pytest.mark.parametrize("cuts", [[1] * 23, [2, 1, 5, 7, 8], [23], [10, 13]])
@pytest.mark.parametrize("recent", [-1, 0, 3, 30])
def test_a_run_is_its_tokens_one_by_one(cuts: list[int], recent: int) -> None:
    """Outputs, stored bits and bytes; with a wrapped ring (the default) and a larger one."""
    levels, numbers = random_levels(23, BELOW, 1), row_numbers(23, 2)
    kind = {"recent": recent, "levels": LOW4 | {Level.LOW2}}
    tokens = kept(9, 12)
    at = Placement({Level.HIGH: tokens[:, :4], Level.LOW4: tokens[:, 4:]})
    alone, together = new_store(), new_store()
    one = alone.open(12, **kind)
    many = together.open(12, ring_slots=max(recent, 0) + max(cuts), **kind)
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
    assert seat.decoded == 1


def test_mass_is_told_by_token() -> None:
    """One row at a time against a softmax over what the seat holds, a run against its rows."""
    store = new_store()
    seat, plain = store.open(9, recent=1, levels=LOW4, ring_slots=8), store.open(5)
    tokens = kept(7, 9)
    fill(store, seat, Placement({Level.HIGH: tokens[:, :3], Level.LOW4: tokens[:, 3:]}))
    fill(store, plain)
    feed(store, [Run(seat, np.full((3, 2), Level.LOW4, dtype=np.int8))], row_numbers(3, 0))
    fork = store.fork(seat)
    levels = random_levels(3, BELOW[:2], 4)  # the layers' regions differ in length
    numbers = row_numbers(5, 1)
    step = step_with_mass(store, [Run(plain, None, 2), Run(seat, levels)], numbers)
    together = step.mass(1)
    assert together.shape == (2, 3, 15)
    by_row = torch.zeros_like(together)
    for n in range(3):
        q, k, v = rows(numbers, slice(n + 2, n + 3))
        mass = step_with_mass(store, [Run(fork, levels[n : n + 1])], (q, k, v)).mass(0)
        for layer in range(SHAPE.layers):
            held = store.dense(fork, layer).values()
            at = torch.cat([part[0] for part in held], dim=1)
            keys = torch.cat([part[1].double() for part in held], dim=1)
            grouped = q[layer, 0].double().view(3, 2, 32)
            weights = torch.softmax(grouped @ keys.transpose(1, 2) / 32**0.5, -1).sum(1)
            expected = torch.zeros(3, 13 + n, dtype=torch.float64).scatter(1, at, weights)
            torch.testing.assert_close(mass[layer].double(), expected, rtol=1e-4, atol=1e-5)
        by_row[:, :, : 13 + n] += mass
    torch.testing.assert_close(together, by_row)
    with pytest.raises(ValueError, match="no mass was asked for"):
        store.begin([Run(plain, None, 1)]).mass(0)


def test_known_tokens_are_stored_without_attending() -> None:
    store = new_store()
    kind = {"recent": 2, "levels": LOW4, "ring_slots": 16}
    asked, told = store.open(6, **kind), store.open(6, **kind)
    fill(store, [asked, told])
    levels, numbers = random_levels(9, BELOW[:2], 3), row_numbers(9, 0)
    feed(store, [Run(asked, levels)], numbers)
    step = store.begin([Run(told, levels)])
    assert step.rows_of(0) == slice(0, 9)
    for layer in range(SHAPE.layers):
        step.append(layer, numbers[1][layer], numbers[2][layer])
    step.finish()
    store.check()
    assert same(store, asked, store, told)


def step_with_mass(
    store: KVStore,
    runs: list[Run],
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Step:
    q, k, v = numbers
    step = store.begin(runs, mass=True)
    for layer in range(SHAPE.layers):
        step.attend(layer, q[layer], k[layer], v[layer])
    step.finish()
    return step
