"""The two floors: sinks with a sliding window, and chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.random_eviction import RandomEviction
from baselines.sinks_recent import SinksRecent
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.loading import load_model
from pask.methods.contract import UNREACHABLE, Method, PromptInfo, Wants
from pask.methods.full import FullKV
from tests.cpu.evictions import DenseDecoder, Driven, Held, Rows, same_as_rules
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import toy_requests

FLOORS = (SinksRecent, RandomEviction)


def info(
    prompt: int, *, layers: int = 1, kv_heads: int = 1, expected: int = 0, page_slots: int = 1
) -> PromptInfo:
    return PromptInfo(prompt, layers, kv_heads, 2, 8, expected, page_slots)


def placed(method: Method, about: PromptInfo) -> Driven:
    state = Driven(method.open(about), about)
    state.place([torch.empty(0)] * about.layers)
    return state


def step(state: Driven) -> torch.Tensor | None:
    about = state.info
    return state.step(torch.zeros(about.layers, about.kv_heads, state.tokens + 1))


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize(("page_slots", "capacity"), [(1, 218), (16, 213)])
def test_capacity_of_the_worked_example(
    floor: type[SinksRecent] | type[RandomEviction], page_slots: int, capacity: int
) -> None:
    about = info(600, expected=60, page_slots=page_slots)
    assert floor(budget=0.33).wanted(about) == capacity
    assert floor(budget=0.2, nominal=0.33).wanted(about) == capacity


def test_sinks_and_window_by_hand() -> None:
    about = info(10, layers=2, kv_heads=2, expected=2)  # 0.5 * 12 = 6 stay
    state = placed(SinksRecent(budget=0.5, sinks=2, min_tokens=1), about)
    assert state.held == [[{0, 1, 6, 7, 8, 9}] * 2] * 2
    dropped = step(state)
    assert dropped is not None
    assert dropped.tolist() == [[[6], [6]]] * 2
    step(state)
    assert state.held == [[{0, 1, 8, 9, 10, 11}] * 2] * 2


def test_sinks_and_window_fill_up_first() -> None:
    state = placed(SinksRecent(budget=0.5, sinks=2, min_tokens=1), info(4, expected=8))
    assert [step(state) is None for _ in range(3)] == [True, True, False]
    assert state.held == [[{0, 1, 3, 4, 5, 6}]]


def test_sinks_leave_room_for_the_last_token() -> None:
    state = placed(SinksRecent(budget=0.1, sinks=4, min_tokens=3), info(30))
    assert state.state.notes == ("sinks",)
    step(state)
    assert state.held == [[{0, 1, 30}]]


class LiteralWindow:
    """Sinks and window once more: a list of tokens, of which the first after the sinks goes."""

    def __init__(self, sinks: int, capacity: int) -> None:
        self.sinks, self.capacity, self.tokens = sinks, capacity, 0
        self.kept: list[int] = []

    def prompt(self, mass: Rows) -> Held:
        for _ in mass[0]:
            held = self.step(mass, b"")
        return held

    def step(self, mass: Rows, token: bytes) -> Held:
        self.kept.append(self.tokens)
        self.tokens += 1
        if len(self.kept) > self.capacity:
            del self.kept[self.sinks]
        return [set(self.kept) for _ in mass]


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 50),
    steps=st.integers(0, 20),
    expected=st.integers(0, 20),
    budget=st.floats(0.05, 0.99),
    sinks=st.integers(0, 6),
    min_tokens=st.integers(1, 9),
)
def test_sinks_and_window_equal_the_literal_form(
    prompt: int, steps: int, expected: int, budget: float, sinks: int, min_tokens: int
) -> None:
    about = info(prompt, layers=2, kv_heads=2, expected=expected)
    capacity = max(round(budget * (prompt + expected)), min_tokens)
    rules = [LiteralWindow(min(sinks, capacity - 1), capacity) for _ in range(2)]
    method = SinksRecent(budget=budget, sinks=sinks, min_tokens=min_tokens)
    same_as_rules(method.open(about), about, rules, 0, [b"x"] * steps)


class Recorded:
    """What a state dropped, told again to the dense decoder."""

    def __init__(self, steps: list[Held]) -> None:
        self.steps = iter(steps)

    def prompt(self, mass: Rows) -> Held:
        return next(self.steps)

    def step(self, mass: Rows, token: bytes) -> Held:
        return next(self.steps)


@pytest.mark.parametrize("method", [SinksRecent(budget=0.4), RandomEviction(budget=0.4, recent=4)])
def test_answers_as_a_dense_decoder_that_masks_what_was_dropped(
    method: SinksRecent | RandomEviction, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path, "qwen3", seed=4)
    model, dense = load_model(str(folder)), DenseDecoder(folder)
    layout, changed = model.layout, 0
    for request in toy_requests(model)[5:9]:
        task = Task(request, (("full", FullKV()), ("floor", method)), expected_new_tokens=12)
        found = {
            one.entry: one.token_ids
            for one in generate(model, [task], Limits(16), kv_dtype=torch.float32, page_slots=1)
        }
        prompt = len(request.prompt_ids)
        about = info(prompt, layers=layout.layers, kv_heads=layout.kv_heads, expected=12)
        # Neither floor looks at the model, so what stays is known beforehand.
        state = placed(method, about)
        held = [[[set(head) for head in layer] for layer in state.held]]
        for _ in range(16):
            step(state)
            held.append([[set(head) for head in layer] for layer in state.held])
        rules = [Recorded([heads[layer] for heads in held]) for layer in range(layout.layers)]
        assert found["floor"] == dense.answer(request, rules, model.token_texts, 16)
        changed += found["floor"] != found["full"]
    assert changed >= 2


@pytest.mark.parametrize("seed", [0, 1])
def test_chance_protects_the_sinks_and_the_last_tokens(seed: int) -> None:
    about = info(120, layers=2, kv_heads=2)
    state = placed(RandomEviction(budget=0.5, recent=16, seed=seed), about)
    for _ in range(40):
        last = set(range(state.tokens - 16, state.tokens))
        for heads in state.held:
            for held in heads:
                assert len(held) == 60
                assert {0, 1, 2, 3} | last <= held
        step(state)


def test_chance_is_the_same_again_and_differs_by_seed_layer_head_and_length() -> None:
    def life(prompt: int, seed: int) -> list[list[Held]]:
        state = placed(RandomEviction(budget=0.5, seed=seed), info(prompt, layers=2, kv_heads=2))
        lives = [[[set(head) for head in layer] for layer in state.held]]
        for _ in range(10):
            dropped = step(state)
            assert dropped is not None
            lives.append([[set(row) for row in layer] for layer in dropped.tolist()])
        return lives

    first = life(120, 0)
    assert life(120, 0) == first
    assert life(120, 1)[0] != first[0]
    (a, b), (c, d) = first[0]
    assert len({frozenset(held) for held in (a, b, c, d)}) == 4
    drawn = [[life[layer][head] for life in first[1:]] for layer in (0, 1) for head in (0, 1)]
    assert all(drawn[n] != drawn[m] for n in range(4) for m in range(n))
    shorter = placed(RandomEviction(budget=0.5), info(118, layers=2, kv_heads=2)).held
    assert shorter[0][0] - {*range(80, 120)} != a - {*range(80, 120)}


def test_every_older_token_is_as_likely_to_stay() -> None:
    # 16 of 24 stay: 2 sinks and 4 last of them surely, 10 of the other 18; then one of 11 goes.
    stayed, gone, runs = torch.zeros(24), torch.zeros(25), 100
    for seed in range(runs):
        method = RandomEviction(budget=16 / 24, sinks=2, recent=4, seed=seed)
        state = placed(method, info(24, layers=5, kv_heads=4))
        for heads in state.held:
            for held in heads:
                stayed[sorted(held)] += 1
        dropped = step(state)
        assert dropped is not None
        gone += torch.bincount(dropped.flatten(), minlength=25)
    stayed, gone = stayed / (20 * runs), gone / (20 * runs)
    assert stayed[[0, 1, 20, 21, 22, 23]].tolist() == [1.0] * 6
    # Of 2000 draws: five standard deviations are 0.056 and 0.025.
    assert (stayed[2:20] - 10 / 18).abs().max() < 0.056
    assert gone[[0, 1, 21, 22, 23, 24]].tolist() == [0.0] * 6
    assert (gone[2:20] - 10 / 18 / 11).abs().max() < 0.025
    assert float(gone[20]) == pytest.approx(1 / 11, abs=0.033)


def test_a_small_capacity_shrinks_what_chance_may_not_touch() -> None:
    state = placed(RandomEviction(budget=0.1), info(120))
    assert state.state.notes == ("window",)  # 12 stay: 3 sinks, 6 last
    step(state)
    assert {0, 1, 2, *range(115, 121)} <= state.held[0][0]
    assert len(state.held[0][0]) == 12


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("fields", [{"budget": 1.0}, {"budget": 0.33, "nominal": 1.0}])
def test_keep_everything_asks_for_nothing(floor: type[Method], fields: dict[str, float]) -> None:
    state = floor(**fields).open(info(20))
    assert (state.wants, state.evicts, state.notes) == (Wants(), False, ())


@pytest.mark.parametrize("floor", FLOORS)
def test_no_attention_is_asked_for(floor: type[Method]) -> None:
    assert floor(budget=0.5).open(info(20)).wants == Wants()


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("prompt", range(1, 65))
def test_short_prompts(floor: type[Method], prompt: int) -> None:
    state = placed(floor(budget=0.33), info(prompt, kv_heads=2))
    wanted = round(0.33 * prompt)
    assert (UNREACHABLE in state.state.notes) == (wanted < 8)
    for decoded in range(1, 12):
        step(state)
        assert {len(held) for held in state.held[0]} == {min(prompt + decoded, max(8, wanted))}


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("fields", [{"budget": 0.01}, {"sinks": -1}, {"min_tokens": 0}])
def test_refused_parameters(floor: type[Method], fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{floor.name}: "):
        floor(**fields)


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ValueError, match="random: "):
        RandomEviction(recent=-1)
