"""RocketKV against worked examples, a literal first stage, and a second stage by plain loops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.rocketkv import RocketKV
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KVStore
from pask.engine.loading import load_model
from pask.methods.contract import Captures, Placement, PromptInfo, RequestState, SlotChoice, Wants
from pask.methods.full import FullKV
from pask.methods.levels import Level
from tests.cpu.kv_stores import Q_HEADS, SHAPE, Run, feed, fill, kept, new_store, row_numbers
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import toy_requests


def info(prompt: int, *, kv_heads: int = 1, group_size: int = 1, **more: Any) -> PromptInfo:
    return PromptInfo(prompt, 2, kv_heads, group_size, more.pop("head_dim", 128), **more)


def kept_by(state: RequestState, about: PromptInfo, mass: torch.Tensor) -> list[list[int]]:
    placement = state.place(0, Captures(window_mass=mass))
    placement.check(about, state.levels)
    assert placement.tokens is not None
    assert set(placement.tokens) == {Level.HIGH}
    return placement.tokens[Level.HIGH].tolist()


# What is stored and what is read


def test_the_worked_example_at_a_third() -> None:
    """660 tokens, 600 of them the prompt: 0.2475 of them are stored, 163, and a third more as
    summaries; 20.6 times fewer are to be read, of which half, 16, are tokens: raised to 64."""
    method, about = RocketKV(budget=0.33), info(600, expected_new_tokens=60)
    assert method.compression == pytest.approx(20.57, abs=0.01)
    assert method.capacity(about) == 103  # (0.33 * 660 - 1/3) / (4/3) - 60
    assert method.second_stage(about) == SlotChoice(3, 75, 64)
    assert RocketKV(budget=0.33, min_topk=1).second_stage(about) == SlotChoice(3, 75, 16)
    # (0.33 * 660 - 3/7) / (8/7) - 60 = 130.2: 3/7 of a token for a last chunk that is not full
    assert RocketKV(budget=0.33, chunk=7).capacity(about) == 130


@pytest.mark.parametrize(("bits", "alpha"), [(6, 0.56), (2, 0.32), (7, 0.62)])
def test_the_rule_of_the_split(bits: int, alpha: float) -> None:
    """c = 64 stores 1 / 10.3 and leaves 6.2 to the second stage, as in the paper's example."""
    stored = 2 ** (-bits * alpha)
    method = RocketKV(budget=0.05, nominal=stored * 4 / 3, min_topk=1)
    assert method.compression == pytest.approx(2**bits)
    choice = method.second_stage(info(2**14))
    assert choice is not None
    left = 2 ** (bits * (1 - alpha))
    assert choice.count == pytest.approx(2 ** (13 - bits), abs=1)
    assert choice.channels == min(128, int(128 * 3 / left))


def test_chunks_of_three_are_the_rule_up_to_0_529() -> None:
    """The square root of what the second stage has left, rounded up, is 3 there, and 2 above."""
    for percent in range(1, 100):
        c = RocketKV(budget=0.05, nominal=percent / 100).compression
        left = c ** (1 - min(0.2 + 0.06 * math.log2(c), 0.8))
        if percent > 1:  # at 1 % c is beyond 1024
            assert math.ceil(math.sqrt(left)) == (3 if percent <= 52 else 2)


def test_no_more_compression_than_the_rule_is_made_for() -> None:
    assert RocketKV(budget=0.05, nominal=0.0).compression == 1024.0


def pages(stored: int, choice: SlotChoice | None) -> int:
    """Pages of 16 slots that a kv head takes."""
    summaries = 0 if choice is None else math.ceil(stored / choice.chunk)
    return math.ceil(stored / 16) + math.ceil(summaries / 16)


def test_capacity_pays_for_the_free_slots_of_both_last_pages() -> None:
    about = info(600, expected_new_tokens=60, page_slots=16)
    capacity = RocketKV(budget=0.33).capacity(about)
    assert capacity == 94  # (0.33 * 667.5 - 15 - 1/3) / (4/3) - 60
    held = full = 0
    for answer in range(36, 84):  # whole pages of summaries around the expected length
        held += pages(capacity + answer, SlotChoice(3, 1, 1))
        full += pages(600 + answer, None)
    assert abs(held / full - 0.33) < 0.0033


@settings(max_examples=60)
@given(
    prompt=st.integers(1, 700),
    expected=st.integers(0, 200),
    answer=st.integers(0, 400),
    chunk=st.sampled_from([1, 2, 3, 4, 7]),
    split=st.sampled_from(["storage", "decoupled"]),
)
def test_bytes_never_shrink_as_the_setting_grows(
    prompt: int, expected: int, answer: int, chunk: int, split: str
) -> None:
    """At any length while there are summaries, and at the expected one beyond."""
    about = info(prompt, expected_new_tokens=expected, page_slots=16)
    before, before_expected = 0, 0
    for n in range(101):
        method = RocketKV(budget=0.05, nominal=n / 100, chunk=chunk, split=split)
        state = method.open(about)
        capacity = state.capacity  # type: ignore[attr-defined]
        assert pages(capacity + expected, state.choice) >= before_expected
        before_expected = pages(capacity + expected, state.choice)
        if state.choice is not None:
            assert pages(capacity + answer, state.choice) >= before
            before = pages(capacity + answer, state.choice)
    assert (capacity, state.choice, state.notes) == (prompt, None, ())


def test_decoupled_stores_the_same_and_reads_what_it_is_told() -> None:
    about = info(600, expected_new_tokens=60, page_slots=16)
    method = RocketKV(budget=0.33, split="decoupled", topk=100, channels=40)
    assert method.capacity(about) == 94
    assert method.second_stage(about) == SlotChoice(3, 40, 100)
    assert RocketKV(split="decoupled", channels=400).second_stage(about) == SlotChoice(3, 128, 64)
    everything = RocketKV(budget=0.33, split="decoupled", topk=0)
    assert everything.second_stage(about) is None
    assert everything.capacity(about) == 153  # SnapKV's: nothing is spent on summaries


# Notes


def test_a_short_capacity_shrinks_the_window_and_says_so() -> None:
    about = info(600, expected_new_tokens=60)
    state = RocketKV(budget=0.33).open(about)
    assert (state.notes, state.wants.window_queries) == (("window",), 25)  # 103 // 4
    state = RocketKV(budget=0.5).open(about)
    assert (state.notes, state.wants.window_queries) == ((), 32)


def test_a_budget_too_tight_is_exceeded_and_said_so() -> None:
    about = info(100, expected_new_tokens=60)
    state = RocketKV(budget=0.2, min_tokens=8).open(about)
    assert set(state.notes) == {"unreachable", "window"}
    assert len(kept_by(state, about, torch.rand(1, 100))[0]) == 8


def test_what_saves_no_page_is_kept_whole_and_said_so() -> None:
    """8 tokens and 3 summaries are two pages a head, as many as 24 tokens."""
    state = RocketKV(budget=0.33).open(info(24, page_slots=16))
    assert (state.choice, state.notes) == (None, ("unreachable",))
    assert state.place(0, Captures()).tokens is None
    assert RocketKV(budget=0.33).open(info(40, page_slots=16)).choice is not None


@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9, 31, 32, 33, 64, 500])
@pytest.mark.parametrize("fields", [{"budget": 1.0}, {"nominal": 1.0}])
def test_keep_everything_asks_for_nothing(prompt: int, fields: dict[str, Any]) -> None:
    state = RocketKV(**fields).open(info(prompt, page_slots=16, expected_new_tokens=20))
    assert (state.wants, state.notes, state.choice) == (Wants(), (), None)
    assert state.place(0, Captures()).tokens is None


@pytest.mark.parametrize(
    "fields",
    [
        {"kernel": 62},
        {"kernel": 0},
        {"window": 0},
        {"chunk": 0},
        {"min_topk": 0},
        {"min_tokens": 0},
        {"split": "traffic"},
        {"topk": -1},
        {"channels": -1},
        {"budget": 0.01},
        {"nominal": 1.5},
    ],
)
def test_refused_parameters(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rocketkv"):
        RocketKV(**fields)


# Stage 1


def first_stage_alone(capacity: int, prompt: int, **fields: Any) -> RocketKV:
    return RocketKV(nominal=capacity / prompt, split="decoupled", topk=0, **fields)


def test_pooling_keeps_the_neighbours_of_a_peak() -> None:
    mass = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]])
    method = first_stage_alone(4, 12, window=1, kernel=3, min_tokens=1)
    assert kept_by(method.open(info(12)), info(12), mass) == [[2, 3, 4, 11]]


def test_a_wide_kernel_makes_a_short_prompt_one_tie() -> None:
    """All earlier tokens lie within 31 of the peak: the latest win, wherever it is."""
    mass = torch.zeros(1, 32)
    mass[0, 10] = 1.0
    method = first_stage_alone(8, 32, window=2)
    assert kept_by(method.open(info(32)), info(32), mass) == [[24, 25, 26, 27, 28, 29, 30, 31]]


def literal(
    mass: torch.Tensor, group: int, window: int, kernel: int, capacity: int
) -> list[list[int]]:
    """The first stage with plain loops: sum over the group, max over the kernel, sort, cut."""
    rows, answer = mass.tolist(), []
    for first in range(0, len(rows), group):
        total = [sum(parts) for parts in zip(*rows[first : first + group], strict=True)]
        end, reach = len(total) - window, kernel // 2
        score = [max(total[max(0, i - reach) : min(end, i + reach + 1)]) for i in range(end)]
        order = sorted(range(end), key=lambda i: (score[i], i), reverse=True)
        answer.append(sorted([*order[: capacity - window], *range(end, len(total))]))
    return answer


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    prompt=st.integers(9, 150),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    share=st.floats(0.1, 0.95),
    kernel=st.sampled_from([1, 3, 15, 63]),
    window=st.integers(1, 40),
    topk=st.sampled_from([0, 5]),
)
def test_the_first_stage_equals_the_literal_form(
    seed: int,
    prompt: int,
    kv_heads: int,
    group: int,
    share: float,
    kernel: int,
    window: int,
    topk: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Eighths are exact in binary, so both forms compute equal sums and ties are real ties.
    mass = torch.randint(0, 9, (kv_heads * group, prompt), generator=generator) / 8
    about = info(prompt, kv_heads=kv_heads, group_size=group)
    method = RocketKV(
        nominal=share, window=window, kernel=kernel, split="decoupled", topk=topk, min_tokens=1
    )
    capacity = max(1, method.capacity(about))
    if capacity + (-(-capacity // 3) if topk else 0) >= prompt:
        return
    used = min(window, max(1, capacity // 4))
    found = kept_by(method.open(about), about, mass)
    assert found == literal(mass, group, used, kernel, capacity)


# Stage 2, on the store


def chosen_by_hand(
    q: torch.Tensor, keys: torch.Tensor, chunk: int, channels: int, count: int
) -> list[int]:
    """Slots that a kv head reads, in double precision and one number after the other.

    q [group, head_dim], keys [stored, head_dim].
    """
    group, stored = q.tolist(), keys.tolist()
    width = range(len(group[0]))
    strength = [sum(abs(query[c]) for query in group) for c in width]
    used = sorted(width, key=lambda c: (-strength[c], c))[:channels]
    sign = [1 if sum(query[c] for query in group) > 0 else -1 for c in width]
    scores = [0.0] * len(stored)
    for query in group:
        share = sum(abs(query[c]) for c in used) / sum(abs(x) for x in query)
        logits = []
        for token in range(len(stored)):
            start = token // chunk * chunk
            part = stored[start : start + chunk]
            best = [max(sign[c] * key[c] for key in part) for c in width]
            logit = sum(sign[c] * query[c] * best[c] for c in used)
            logits.append(logit / math.sqrt(len(width) * share))
        weights = [math.exp(logit - max(logits)) for logit in logits]
        scores = [a + w / sum(weights) for a, w in zip(scores, weights, strict=True)]
    return sorted(sorted(range(len(stored)), key=lambda n: (-scores[n], -n))[:count])


def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(q.double() @ keys.double().T / keys.shape[1] ** 0.5, dim=-1)
    return (weights @ values.double()).float()


def resident(store: KVStore, seat: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    _, keys, values = store.dense(seat, layer)["high"]
    return keys, values


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize(("topk", "channels"), [(4, 8), (7, 32), (400, 8)])
def test_a_step_reads_the_best_chunks_and_nothing_else(
    chunk: int, topk: int, channels: int
) -> None:
    """With a chunk of one token, the tokens whose logit over the largest channels is highest; with
    more to read than there is, all that is resident."""
    about = PromptInfo(29, SHAPE.layers, SHAPE.kv_heads, Q_HEADS // SHAPE.kv_heads, SHAPE.head_dim)
    method = RocketKV(
        nominal=0.9, chunk=chunk, split="decoupled", topk=topk, channels=channels, min_tokens=10
    )
    choice = method.open(about).choice
    assert choice == SlotChoice(chunk, channels, topk)
    store = new_store()
    seat = store.open(29, choice=choice)
    fill(store, seat, Placement.high(kept(11, 29)))
    for step in range(5):
        q, k, v = row_numbers(1, step)
        out, _ = feed(store, [Run(seat, None, 1)], (q, k, v))
        for layer in range(SHAPE.layers):
            keys, values = resident(store, seat, layer)
            assert keys.shape[1] == 12 + step
            for head in range(SHAPE.kv_heads):
                group = q[layer, 0, 2 * head : 2 * head + 2]
                slots = chosen_by_hand(group, keys[head], chunk, channels, topk)
                assert len(slots) == min(topk, 12 + step)
                expected = attended(group, keys[head][slots], values[head][slots])
                torch.testing.assert_close(
                    out[layer, 0, 2 * head : 2 * head + 2], expected, rtol=1e-4, atol=1e-5
                )


def test_equal_queries_of_a_group_get_equal_outputs() -> None:
    store = new_store()
    seat = store.open(29, choice=SlotChoice(3, 8, 5))
    fill(store, seat)
    q, k, v = row_numbers(1, 0)
    q = q[:, :, ::2].repeat_interleave(2, dim=2)
    out, _ = feed(store, [Run(seat, None, 1)], (q, k, v))
    assert torch.equal(out[:, :, ::2], out[:, :, 1::2])


# The whole method, decoding


class _WithoutSummaries(RocketKV):
    """Keeps what RocketKV keeps and reads all of it."""

    def open(self, info: PromptInfo) -> RequestState:
        state = super().open(info)
        state.choice = None
        return state


def test_reading_as_many_as_there_are_is_dense_attention_over_what_is_kept(tmp_path: Path) -> None:
    model = load_model(str(tiny_folder(tmp_path, "qwen3", seed=2, head_dim=32)))
    some: dict[str, Any] = {"nominal": 0.6, "window": 4, "kernel": 3, "channels": 4}
    some["split"] = "decoupled"
    entries = (
        ("full", FullKV()),
        ("dense", _WithoutSummaries(topk=64, **some)),
        ("all", RocketKV(topk=400, **some)),
        ("few", RocketKV(topk=2, **some)),
    )
    requests = toy_requests(model)[4:]
    found = generate(
        model, [Task(r, entries, 20) for r in requests], Limits(20), kv_dtype=torch.float32
    )
    answers = {(one.request_id, one.entry): one for one in found}
    differ = {"full": 0, "few": 0}
    for request in requests:
        dense, everything = answers[request.id, "dense"], answers[request.id, "all"]
        assert everything.token_ids == dense.token_ids
        assert everything.bytes.prompt > dense.bytes.prompt
        for entry in differ:
            differ[entry] += answers[request.id, entry].token_ids != dense.token_ids
    assert min(differ.values()) > 0  # what is kept, and what is read, does matter here
