"""What attention reads of a seat, counted by hand, and that no more than that is looked at."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xgrammar as xgr

from baselines.rocketkv import RocketKV
from kernels import choose_slots
from kernels.paged import HighPages, Region
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KVStore, Run, Seat, SlotChoice
from pask.engine.kv_traffic import bytes_read
from pask.engine.loading import load_model, tokenizer_info
from pask.methods.contract import Placement, PromptInfo
from pask.methods.levels import Level
from tests.cpu.kv_stores import SHAPE, feed, kept, new_store, prompt_numbers, row_numbers
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import toy_requests


def two_layers(store: KVStore, choice: SlotChoice | None) -> Seat:
    """A seat with a prompt of 20 tokens, of which the layers keep 5 and 9 in each kv head."""
    seat = store.open(20, choice=choice)
    for layer, count in enumerate((5, 9)):
        keys, values = prompt_numbers(20)[layer]
        store.add_prompt([seat], layer, keys, values, Placement.high(kept(count, 20)))
    return seat


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2), (torch.float32, 4)])
def test_each_row_reads_by_what_its_layers_store(dtype: torch.dtype, size: int) -> None:
    store = new_store(dtype=dtype)
    seat = two_layers(store, SlotChoice(chunk=4, channels=7, count=6))
    # 5 and 9 tokens: 5 and 6 of them are read, and 2 and 3 chunks are looked at.
    assert bytes_read(store, seat, [0]) == [3 * size * ((5 + 6) * 64 + (2 + 3) * 7)]
    feed(store, [Run(seat, None, 1)], row_numbers(1, 0))
    # 6 and 10 tokens in 2 and 3 chunks.
    assert bytes_read(store, seat, [0]) == [3 * size * ((6 + 6) * 64 + (2 + 3) * 7)]
    feed(store, [Run(seat, None, 4)], row_numbers(4, 1))
    # 7, 8, 9 and 10 tokens in 2, 2, 3, 3 chunks; 11, 12, 13 and 14 in 3, 3, 4, 4.
    assert bytes_read(store, seat, [0, 0, 0, 0]) == [
        3 * size * (12 * 64 + chunks * 7) for chunks in (5, 5, 7, 7)
    ]


def test_without_a_choice_all_that_is_resident_is_read_whole_pages_too() -> None:
    store = new_store()
    seat = two_layers(store, None)
    _, held = feed(store, [Run(seat, None, 3)], row_numbers(3, 0))
    # Pages of 4 slots: 6 to 8 tokens are 2 pages, 10 to 12 are 3; a slot of 3 heads is 384 bytes.
    assert bytes_read(store, seat, held.tolist()) == [5 * 4 * 384] * 3


@pytest.mark.parametrize("choice", [SlotChoice(1, 32, 100), SlotChoice(3, 32, 8)])
def test_no_more_is_read_than_is_resident(choice: SlotChoice) -> None:
    store = new_store()
    seat = store.open(13, choice=choice)
    for layer in range(SHAPE.layers):
        store.add_prompt([seat], layer, *prompt_numbers(13)[layer])
    for rows in (1, 5, 2):
        _, held = feed(store, [Run(seat, None, rows)], row_numbers(rows, rows))
        read = bytes_read(store, seat, held.tolist())
        assert all(0 < one <= most for one, most in zip(read, held, strict=True))


def test_summaries_are_looked_at_in_one_bound_of_the_chosen_channels_only() -> None:
    """All numbers of the bounds but the largest channels' one are made unusable: the same slots."""
    torch.manual_seed(3)
    group, dim, chunks, channels = 2, 32, 8, 5
    q = torch.randn(1, 1, group, dim)
    data = torch.randn(1, 2, chunks, dim).sort(1).values.half()
    largest = q[0, 0].abs().sum(0).argsort(descending=True)[:channels]
    upper = (q[0, 0].sum(0) > 0).long()
    spoiled = torch.full_like(data, torch.nan)
    for channel in largest.tolist():
        half = int(upper[channel])
        spoiled[0, half, :, channel] = data[0, half, :, channel]
    assert int(spoiled.isfinite().sum()) == chunks * channels  # what is counted
    sequence, stop = torch.zeros(1, dtype=torch.int32), torch.tensor([[30]], dtype=torch.int32)
    table, seen = torch.zeros(1, 1, 1, dtype=torch.int32), torch.tensor([[8]], dtype=torch.int32)

    def slots(numbers: torch.Tensor) -> torch.Tensor:
        region = Region(HighPages(numbers), table, seen)
        return choose_slots(q, sequence, region, stop, 4, channels, 9)

    assert torch.equal(slots(spoiled), slots(data))
    # One number more that is not there would show.
    spoiled[0, int(upper[largest[0]]), 0, largest[0]] = torch.inf
    assert not torch.equal(slots(spoiled), slots(data))


def test_low_levels_have_no_choice_and_read_what_they_hold() -> None:
    store = new_store()
    seat = store.open(8, levels=frozenset({Level.LOW4}), acts=False)
    tokens = {Level.LOW4: torch.arange(8).expand(3, -1)}
    for layer in range(SHAPE.layers):
        keys, values = prompt_numbers(8)[layer]
        store.add_prompt([seat], layer, keys, values, Placement(tokens))
    held = store.resident_total(seat)
    assert held > 0
    assert bytes_read(store, seat, [held]) == [held]


# A method with a second stage, decoding


def tokens_read(method: RocketKV, about: PromptInfo, new_tokens: int) -> float:
    """KV that a step after `new_tokens` reads per layer and kv head, in tokens at 16 bit: `topk`
    tokens and, of the key bound of each chunk, the r channels in question (of 2 head_dim numbers
    in a slot)."""
    state = method.open(about)
    stored: int = state.capacity + new_tokens  # type: ignore[attr-defined]
    if state.choice is None:
        return float(stored)
    scanned = math.ceil(stored / state.choice.chunk) * state.choice.channels
    return min(state.choice.count, stored) + scanned / (2 * about.head_dim)


def test_tokens_read_at_a_step_in_the_worked_example() -> None:
    about = PromptInfo(600, 2, 1, 1, 128, expected_new_tokens=60)
    # 64 tokens, and of 55 chunks (163 tokens) 75 of the 256 numbers that a token has.
    assert tokens_read(RocketKV(budget=0.33), about, 60) == 64 + 55 * 75 / 256
    assert tokens_read(RocketKV(budget=1.0), about, 60) == 660
    assert tokens_read(RocketKV(budget=0.33, split="decoupled", topk=0), about, 60) == 218


@pytest.mark.parametrize(("topk", "read"), [(5, 45), (14, 11 + 12 + 13 + 6 * 14)])
def test_bytes_read_over_an_answer(tmp_path: Path, topk: int, read: int) -> None:
    """42 prompt tokens, 11 of them kept: (0.7 * 57.5 - 15 - 1/3) / (4/3) - 8 = 10.7. The nine
    choices see 11 to 19 stored tokens, so 4, 4, 5, 5, 5, 6, 6, 6 and 7 chunks: 48; of each 4 of 16
    channels are looked at, 8 bytes. A token's key and value are 64; 2 layers with 2 kv heads."""
    model = load_model(str(tiny_folder(tmp_path, "qwen3", seed=2)))
    method = RocketKV(
        nominal=0.7, window=4, kernel=3, channels=4, split="decoupled", topk=topk, min_tokens=1
    )
    about = PromptInfo(42, 2, 2, 2, 16, expected_new_tokens=8, page_slots=16)
    assert method.open(about).choice == SlotChoice(3, 4, topk)
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    grammar = compiler.compile_grammar('root ::= "name: " [a-z]{60,90}')
    request = replace(toy_requests(model)[6], grammar=grammar)
    entries = (("all", RocketKV(nominal=1.0)), ("some", method))
    for longest_run in (1, 64):  # tokens that the grammar forces are fed one by one, or together
        tasks = [Task(request, entries, 8)]
        found = {a.entry: a for a in generate(model, tasks, Limits(9), longest_run=longest_run)}
        some, whole = found["some"], found["all"].bytes
        assert (some.prompt_tokens, some.new_tokens, some.finish) == (42, 9, "length")
        assert some.bytes.read_sum == 4 * (read * 64 + 48 * 8)
        by_formula = sum(tokens_read(method, about, n) for n in range(9))
        assert some.bytes.read_sum == by_formula * 4 * 64
        # A page for up to 16 tokens, six choices, two beyond; one more page for the summaries. The
        # first choice counts the same pages.
        assert some.bytes.resident_sum == 4 * 64 * (6 * (16 + 16) + 3 * (32 + 16))
        assert whole.read_sum == whole.resident_sum == whole.full_sum
