"""Bytes of what a sequence holds in the KV store, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pask.engine.kv_store import Run
from pask.methods.contract import Placement
from pask.methods.levels import Level
from tests.cpu.kv_stores import (
    LOW4,
    SLOT,
    feed,
    fill,
    kept,
    new_store,
    row_numbers,
)


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
    assert seat.position == 105


def test_plain_low_keys_and_high_tokens_have_no_statistics() -> None:
    store = new_store()
    plain, high = store.open(8, levels=LOW4, normalise=False), store.open(8)
    fill(store, plain, Placement({Level.LOW4: kept(8, 8)}))
    fill(store, high)
    assert store.resident_bytes(plain)["prompt"] == {"low4": 8 * SLOT * 5 // 16}
    assert "statistics" not in store.resident_bytes(high)["prompt"]
