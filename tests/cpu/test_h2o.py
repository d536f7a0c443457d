"""H2O against worked examples, a slow literal second form and a dense decoder with masks."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.h2o import H2O
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.loading import load_model
from pask.methods.contract import UNREACHABLE, PromptInfo, RequestState, Wants
from pask.methods.full import FullKV
from tests.cpu.evictions import DenseDecoder, Driven, Held, Rows, same_as_rules
from tests.cpu.tiny import LAYOUTS, tiny_folder
from tests.cpu.toys import toy_requests


def info(
    prompt: int, *, layers: int = 1, kv_heads: int = 1, group_size: int = 1, expected: int = 0
) -> PromptInfo:
    return PromptInfo(prompt, layers, kv_heads, group_size, 8, expected)


def driven(method: H2O, about: PromptInfo, *masses: list[float]) -> Driven:
    """A state of one layer after its prompt; `masses` by query head."""
    state = Driven(method.open(about), about)
    state.place([torch.tensor(masses)])
    return state


def step(state: Driven, **mass: float) -> int | None:
    """Decode one token; `mass` by token, t0=..; which token was dropped."""
    row = torch.zeros(1, 1, state.tokens + 1)
    for token, share in mass.items():
        row[0, 0, int(token[1:])] = share
    dropped = state.step(row)
    return None if dropped is None else int(dropped.item())


@pytest.mark.parametrize(
    ("prompt", "answer", "page_slots", "capacity"),
    [(600, 60, 1, 218), (600, 60, 16, 213), (300, 40, 16, 107)],
)
def test_capacity_of_the_worked_examples(
    prompt: int, answer: int, page_slots: int, capacity: int
) -> None:
    # 0.33 * 660 = 217.8; 0.33 * 667.5 - 7.5 = 212.775; 0.33 * 347.5 - 7.5 = 107.175
    about = PromptInfo(prompt, 2, 1, 1, 8, answer, page_slots)
    assert H2O(budget=0.33).wanted(about, answer) == capacity


def test_four_steps_by_hand() -> None:
    # 0.5 * (6 + 2) = 4 tokens stay: the two heaviest and the last two.
    about = info(6, expected=2)
    state = driven(H2O(budget=0.5, min_tokens=1), about, [3.0, 0.5, 1.0, 0.75, 0.5, 0.25])
    assert state.held == [[{0, 2, 4, 5}]]
    # 0: 3.25, 2: 1.0, 4: 0.75, last 5 and 6
    assert step(state, t0=0.25, t4=0.25, t5=0.25, t6=0.25) == 4
    # 0: 3.25, 2: 1.0, 5: 0.5 + 0.75, last 6 and 7
    assert step(state, t5=0.75, t6=0.125, t7=0.125) == 2
    # 0: 3.25, 5: 1.25, 6: 0.25 + 0.125 + 0.875: of two equals the later stays
    assert step(state, t6=0.875, t8=0.125) == 5
    # 0: 3.25, 6: 1.25, 7: 0.125 + 1.0
    assert step(state, t7=1.0) == 7
    assert state.held == [[{0, 6, 8, 9}]]


def test_a_token_that_was_dropped_gives_the_others_nothing() -> None:
    state = driven(H2O(budget=0.5, min_tokens=1), info(6, expected=2), [1.0, 9, 2, 3, 0, 0])
    assert state.held == [[{1, 3, 4, 5}]]
    assert step(state, t4=2.5) == 4  # 9, 3 and 2.5: what 0 and 2 had is nobody's
    assert step(state, t5=4.0) == 3  # 9, 3 and 4


def test_before_the_cache_is_full_nothing_is_dropped_but_sums_grow() -> None:
    about = info(4, expected=8)  # 6 tokens stay: 3 and 3
    state = driven(H2O(budget=0.5, min_tokens=1), about, [1.0, 1.0, 1.0, 1.0])
    assert state.held == [[{0, 1, 2, 3}]]
    assert step(state, t2=0.5, t0=0.5) is None
    assert step(state, t3=0.5, t0=0.5) is None
    assert step(state) == 1


def test_query_heads_of_a_group_are_averaged_and_kv_heads_choose_apart() -> None:
    about = info(6, kv_heads=2, group_size=2)
    method = H2O(budget=0.34, min_tokens=1)  # 0.34 * 6 = 2 tokens: the heaviest and the last
    state = driven(
        method,
        about,
        [0.9, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.8, 0.6, 0.0, 0.0, 0.0],  # group 0: 0.45, 0.4, 0.3
        [0.0, 0.0, 0.5, 0.0, 0.0, 0.0],
        [0.0, 0.8, 0.5, 0.0, 0.0, 0.0],  # group 1: 0, 0.4, 0.5
    )
    assert state.held == [[{0, 5}, {2, 5}]]
    # Step mass is summed over the group: 0.95 there is 0.475 here, between 0.45 and 0.5.
    mass = torch.zeros(1, 2, 7)
    mass[0, :, 5] = 0.95
    dropped = state.step(mass)
    assert dropped is not None
    assert dropped.tolist() == [[[0], [5]]]


def test_without_heavy_tokens_a_window_slides() -> None:
    state = driven(H2O(budget=0.5, heavy_share=0.0, min_tokens=1), info(8), [1.0] * 8)
    assert state.held == [[{4, 5, 6, 7}]]
    assert [step(state, t4=5.0), step(state, t5=5.0)] == [4, 5]


def test_with_heavy_tokens_alone_the_newest_can_go() -> None:
    state = driven(H2O(budget=0.5, heavy_share=1.0, min_tokens=1), info(4), [1.0, 2, 3, 4])
    assert state.held == [[{2, 3}]]
    assert step(state, t2=0.5, t4=0.5) == 4


def test_growing_capacity_follows_the_length() -> None:
    method = H2O(budget=0.5, min_tokens=2, growing=True)
    state = driven(method, info(8, expected=100), [8.0, 7, 6, 5, 4, 3, 2, 1])
    assert state.held == [[{0, 1, 6, 7}]]
    sizes = []
    for _ in range(4):
        step(state)
        sizes.append(len(state.held[0][0]))
    assert sizes == [4, 5, 6, 6]  # half of 9 to 12; 4.5 and 5.5 round to the even number


def test_ablations_by_hand() -> None:
    masses = [0.0, 4.0, 2.0, 2.0, 1.0, 1.0]
    kept = driven(H2O(budget=0.67, sinks=1, min_tokens=1), info(6), masses).held
    assert kept == [[{0, 1, 4, 5}]]  # 0 stays although nobody looked at it
    # By lifetime: 4/5, 2/4, 2/3 of the queries that could see tokens 1, 2 and 3.
    kept = driven(H2O(budget=0.67, lifetime=True, min_tokens=1), info(6), masses).held
    assert kept == [[{1, 3, 4, 5}]]
    state = driven(H2O(budget=0.67, decay=0.25, min_tokens=1), info(6), masses)
    assert state.held == [[{1, 3, 4, 5}]]
    # 1: 4 / 4; 3: 2 / 4 + 0.25; 4: 1 / 4 + 0.5; of two equals the later stays
    assert step(state, t3=0.25, t4=0.5) == 3


class LiteralH2O:
    """One layer once more with dictionaries: sort the older tokens by their sums, cut."""

    def __init__(self, method: H2O, about: PromptInfo) -> None:
        self.method, self.about, self.tokens = method, about, about.prompt_tokens
        self.sums: list[dict[int, Fraction]] = []

    def prompt(self, mass: Rows) -> Held:
        self.sums = [dict(enumerate(row)) for row in mass]
        return self.cut()

    def step(self, mass: Rows, token: bytes) -> Held:
        self.tokens += 1
        for sums, row in zip(self.sums, mass, strict=True):
            sums[self.tokens - 1] = Fraction(0)
            for n in sums:
                sums[n] = sums[n] * Fraction(self.method.decay) + row[n]
        return self.cut()

    def cut(self) -> Held:
        method, about = self.method, self.about
        new = self.tokens - about.prompt_tokens if method.growing else about.expected_new_tokens
        capacity = round(method.budget * (about.prompt_tokens + new))
        capacity = max(capacity, method.min_tokens)
        heavy = int(capacity * method.heavy_share)
        for sums in self.sums:
            last = [n for n in sums if n >= self.tokens - (capacity - heavy)]
            first = list(range(min(method.sinks, heavy)))
            older = [n for n in sums if n not in last and n not in first]
            older.sort(key=lambda n: (self.rank(sums, n), n))
            while older and len(sums) > capacity:
                del sums[older.pop(0)]
        return [set(sums) for sums in self.sums]

    def rank(self, sums: dict[int, Fraction], token: int) -> Fraction:
        return sums[token] / (self.tokens - token if self.method.lifetime else 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    prompt=st.integers(1, 40),
    steps=st.integers(0, 14),
    expected=st.integers(0, 12),
    kv_heads=st.integers(1, 3),
    group_size=st.sampled_from([1, 2, 4]),
    budget=st.floats(0.05, 0.99),
    heavy_share=st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]),
    min_tokens=st.integers(1, 9),
    options=st.fixed_dictionaries(
        {},
        optional={
            "growing": st.booleans(),
            "lifetime": st.booleans(),
            "decay": st.sampled_from([0.5, 1.0]),
            "sinks": st.integers(0, 5),
        },
    ),
)
def test_equals_the_literal_form(
    seed: int,
    prompt: int,
    steps: int,
    expected: int,
    kv_heads: int,
    group_size: int,
    budget: float,
    heavy_share: float,
    min_tokens: int,
    options: dict[str, Any],
) -> None:
    about = info(prompt, layers=2, kv_heads=kv_heads, group_size=group_size, expected=expected)
    method = H2O(budget=budget, heavy_share=heavy_share, min_tokens=min_tokens, **options)
    rules = [LiteralH2O(method, about) for _ in range(about.layers)]
    same_as_rules(method.open(about), about, rules, seed, [b"x"] * steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_as_a_dense_decoder_that_masks_what_was_dropped(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path, layout, seed=4)
    model, dense = load_model(str(folder)), DenseDecoder(folder)
    heads = model.layout
    masses: list[torch.Tensor] = []
    opened = H2O.open

    def watched(self: H2O, about: PromptInfo) -> RequestState:
        state = opened(self, about)
        evict = state.evict

        def seen(tokens: int, mass: torch.Tensor | None) -> torch.Tensor | None:
            assert mass is not None
            masses.append(mass.sum(dim=-1))
            return evict(tokens, mass)

        state.evict = seen  # type: ignore[method-assign]
        return state

    monkeypatch.setattr(H2O, "open", watched)
    method = H2O(budget=0.4)
    changed = 0
    for request in toy_requests(model)[5:9]:
        task = Task(request, (("full", FullKV()), ("h2o", method)), expected_new_tokens=12)
        full, found = generate(model, [task], Limits(16), kv_dtype=torch.float32, page_slots=1)
        full, found = sorted((full, found), key=lambda one: one.entry)
        about = PromptInfo(
            len(request.prompt_ids), heads.layers, heads.kv_heads, heads.group_size, 16, 12
        )
        rules = [LiteralH2O(method, about) for _ in range(heads.layers)]
        assert found.token_ids == dense.answer(request, rules, model.token_texts, 16)
        changed += found.token_ids != full.token_ids
        fed = found.new_tokens - (found.finish == "length")
        kept = min(max(8, round(0.4 * (about.prompt_tokens + 12))), about.prompt_tokens + fed)
        slot = 2 * heads.layers * heads.kv_heads * 16 * 4  # keys and values, fp32
        assert found.bytes.prompt + found.bytes.decode == kept * slot
    assert changed >= 1
    for mass in masses:  # a step's probabilities, of each query head, make 1
        torch.testing.assert_close(mass, torch.full_like(mass, heads.group_size))


@pytest.mark.parametrize("fields", [{"budget": 1.0}, {"budget": 0.33, "nominal": 1.0}])
def test_keep_everything_asks_for_nothing(fields: dict[str, Any]) -> None:
    state = H2O(**fields).open(info(20))
    assert (state.wants, state.evicts, state.notes) == (Wants(), False, ())


def test_the_knob_decides_once_it_was_searched() -> None:
    about = info(100, expected=20)
    assert H2O(budget=0.33, nominal=0.5).wanted(about, 20) == 60


@pytest.mark.parametrize("prompt", range(1, 65))
def test_short_prompts(prompt: int) -> None:
    about = info(prompt, kv_heads=2)
    state = H2O(budget=0.33).open(about)
    wanted = round(0.33 * prompt)
    assert state.notes == ((UNREACHABLE,) if wanted < 8 else ())
    run = Driven(state, about)
    run.place([torch.rand(2, prompt)])
    for decoded in range(1, 12):
        run.step(torch.rand(1, 2, prompt + decoded))
        assert {len(held) for held in run.held[0]} == {min(prompt + decoded, max(8, wanted))}


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": 0.01},
        {"nominal": 1.5},
        {"heavy_share": 1.1},
        {"min_tokens": 0},
        {"sinks": -1},
        {"decay": 0.0},
    ],
)
def test_refused_parameters(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="h2o"):
        H2O(**fields)
