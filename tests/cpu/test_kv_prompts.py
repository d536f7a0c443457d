"""Prompts in the KV store: statistics, values that do not fit, another method's placement."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pask.engine.kv_store import Run
from pask.errors import PaskError
from pask.methods.contract import Placement
from pask.methods.levels import Level
from tests.cpu.kv_stores import (
    LOW4,
    SHAPE,
    feed,
    fill,
    kept,
    new_store,
    prompt_numbers,
    random_levels,
    row_numbers,
    same,
)


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
