"""Seats that read only the slots that chunk summaries single out."""

from __future__ import annotations

import pytest
import torch

from pask.engine.kv_store import Run, SlotChoice
from pask.methods.contract import Placement
from pask.methods.levels import Level
from tests.cpu.kv_stores import (
    SHAPE,
    feed,
    fill,
    new_store,
    prompt_numbers,
    row_numbers,
    rows,
    same,
)

SLOT = 2 * 2 * 3 * 32 * 2


def test_choosing_all_tokens_is_attending_to_all() -> None:
    store = new_store()
    seat, plain = store.open(13, choice=SlotChoice(3, 8, 100)), store.open(13)
    fill(store, seat)
    fill(store, plain)
    numbers = row_numbers(6, 0)
    out, _ = feed(store, [Run(seat, None, 6)], numbers)
    expected, _ = feed(store, [Run(plain, None, 6)], numbers)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    store.check()


def test_one_chosen_token_comes_out_as_it_is() -> None:
    store = new_store()
    seat = store.open(13, choice=SlotChoice(1, 32, 1))
    fill(store, seat)
    q, k, v = row_numbers(1, 0)
    out, _ = feed(store, [Run(seat, None, 1)], (q, k, v))
    for layer in range(SHAPE.layers):
        keys = torch.cat((prompt_numbers(13)[layer, 0].half(), k[layer].half().transpose(0, 1)), 1)
        values = torch.cat(
            (prompt_numbers(13)[layer, 1].half(), v[layer].half().transpose(0, 1)), 1
        )
        for head in range(SHAPE.kv_heads):
            # Chunks of one token and all channels: a token's own logits, averaged as softmaxes.
            group = q[layer, 0, 2 * head : 2 * head + 2].double()
            weights = torch.softmax(group @ keys[head].double().T / 32**0.5, -1).mean(0)
            best = values[head, int(weights.argmax())].float()
            assert torch.equal(out[layer, 0, 2 * head], best)
            assert torch.equal(out[layer, 0, 2 * head + 1], best)


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_summaries_are_the_bounds_of_each_chunk(chunk: int) -> None:
    store = new_store()
    seat = store.open(10, choice=SlotChoice(chunk, 8, 4))
    tokens = torch.arange(10).expand(3, -1)[:, 1:]
    fill(store, seat, Placement.high(tokens))
    numbers = row_numbers(8, 1)
    for these in (slice(0, 1), slice(1, 6), slice(6, 8)):
        feed(store, [Run(seat, None, these.stop - these.start)], rows(numbers, these))
        store.check()
    for layer in range(SHAPE.layers):
        dense = store.dense(seat, layer)
        _, keys, _ = dense["high"]
        _, low, high = dense["summary"]
        parts = keys.split(chunk, dim=1)
        assert torch.equal(low, torch.stack([part.amin(1) for part in parts], dim=1))
        assert torch.equal(high, torch.stack([part.amax(1) for part in parts], dim=1))


def test_a_run_is_its_tokens_one_by_one_beside_other_seats() -> None:
    one, many = new_store(), new_store()
    numbers, other = row_numbers(9, 0), row_numbers(2, 1)
    seats = []
    for store in (one, many):
        seats.append(store.open(11, choice=SlotChoice(3, 8, 5)))
        fill(store, seats[-1])
    plain = many.open(5)
    fill(many, plain)
    together = tuple(torch.cat(parts, dim=1) for parts in zip(numbers, other, strict=True))
    out, held = feed(many, [Run(seats[1], None, 9), Run(plain, None, 2)], together)
    many.check()
    for n in range(9):
        these = slice(n, n + 1)
        expected = feed(one, [Run(seats[0], None, 1)], rows(numbers, these))
        assert torch.equal(out[:, n], expected[0][:, 0])
        assert held[n] == expected[1][0]
    assert same(one, seats[0], many, seats[1])


def test_bytes_of_summaries() -> None:
    store = new_store()
    seat = store.open(11, choice=SlotChoice(2, 8, 4))
    fill(store, seat)
    assert store.resident_bytes(seat) == {
        "prompt": {"high": 11 * SLOT, "summary": 6 * SLOT},
        "decode": {"high": SLOT, "summary": 2 * SLOT},
    }
    _, held = feed(store, [Run(seat, None, 6)], row_numbers(6, 0))
    assert held.tolist() == [(12 + 8) * SLOT] + 4 * [(16 + 8) * SLOT] + [(20 + 12) * SLOT]
    assert store.resident_total(seat) == held[-1]


def test_what_is_only_appended_enters_the_summaries() -> None:
    """As attending does, in runs of any length, beside a seat without summaries."""
    one, many = new_store(), new_store()
    numbers = row_numbers(9, 0)
    seats = [store.open(11, choice=SlotChoice(3, 8, 5)) for store in (one, many)]
    fill(one, seats[0])
    fill(many, seats[1])
    plain = many.open(5)
    fill(many, plain)
    for n in range(7):
        feed(one, [Run(seats[0], None, 1)], rows(numbers, slice(n, n + 1)))
    for these, held in ((slice(0, 1), 1), (slice(1, 7), 6)):
        step = many.begin([Run(plain, None, 2), Run(seats[1], None, held)])
        _, k, v = rows(numbers, these)
        for layer in range(SHAPE.layers):
            beside = torch.full((2, *k.shape[2:]), 9.0)
            step.append(layer, torch.cat((beside, k[layer])), torch.cat((beside, v[layer])))
        step.finish()
        many.check()
    assert same(one, seats[0], many, seats[1])
    last = rows(numbers, slice(7, 9))
    out, _ = feed(one, [Run(seats[0], None, 2)], last)
    assert torch.equal(out, feed(many, [Run(seats[1], None, 2)], last)[0])


def test_forks_have_summaries_of_their_own() -> None:
    store = new_store()
    seat = store.open(11, choice=SlotChoice(3, 8, 4))
    fill(store, seat)
    fork = store.fork(seat)
    before = store.dense(fork, 0)["summary"]
    feed(store, [Run(seat, None, 3)], row_numbers(3, 0))
    store.check()
    assert all(map(torch.equal, before, store.dense(fork, 0)["summary"]))


def test_what_does_not_go_with_a_choice_is_refused() -> None:
    store = new_store()
    with pytest.raises(ValueError, match="all end at HIGH"):
        store.open(4, choice=SlotChoice(2, 8, 4), levels=frozenset({Level.LOW4}))
    seat = store.open(4, choice=SlotChoice(2, 8, 4))
    fill(store, seat)
    with pytest.raises(ValueError, match="no mass by token"):
        store.begin([Run(seat, None, 1)], mass=True)
    with pytest.raises(ValueError, match="keeps its tokens"):
        store.evict(seat, torch.zeros(2, 3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least 1"):
        SlotChoice(0, 8, 4)
    plain = store.open(4)
    with pytest.raises(ValueError, match="different make"):
        store.add_prompt(
            [plain, store.open(4, choice=SlotChoice(2, 8, 4))], 0, *prompt_numbers(4)[0]
        )
