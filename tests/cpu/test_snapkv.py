"""SnapKV against worked examples and a slow, literal second implementation."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.snapkv import SnapKV
from pask.methods.contract import Captures, PromptInfo, RequestState
from pask.methods.levels import Level


def info(prompt: int, *, kv_heads: int = 1, group_size: int = 1, expected: int = 0) -> PromptInfo:
    return PromptInfo(prompt, 2, kv_heads, group_size, 8, expected)


def keep(method: SnapKV, about: PromptInfo, mass: torch.Tensor) -> list[list[int]]:
    state = method.open(about)
    return kept_by(state, about, mass).tolist()


def kept_by(state: RequestState, about: PromptInfo, mass: torch.Tensor) -> torch.Tensor:
    placement = state.place(0, Captures(window_mass=mass))
    placement.check(about, state.levels)
    assert placement.tokens is not None
    assert set(placement.tokens) == {Level.HIGH}
    return placement.tokens[Level.HIGH]


@pytest.mark.parametrize(
    ("prompt", "answer", "capacity"),
    [(600, 60, 158), (450, 60, 108), (300, 40, 72), (600, 120, 118)],
)
def test_capacity_of_the_worked_examples(prompt: int, answer: int, capacity: int) -> None:
    assert SnapKV(budget=0.33).capacity(info(prompt, expected=answer)) == capacity


def test_capacity_pays_for_the_free_slots_of_the_last_page() -> None:
    about = PromptInfo(600, 2, 1, 1, 8, expected_new_tokens=60, page_slots=16)
    capacity = SnapKV(budget=0.33).capacity(about)
    assert capacity == 153  # 0.33 * 600 - 0.67 * (60 + 7.5)
    lengths = range(52, 68)  # one whole page of answer lengths around the expected one
    pages = sum(-(-(capacity + t) // 16) for t in lengths) / sum(
        -(-(600 + t) // 16) for t in lengths
    )
    assert abs(pages - 0.33) < 0.0033


def test_plain_top_k_with_kernel_one() -> None:
    mass = torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.3, 0.0, 0.0, 0.0]])
    method = SnapKV(budget=0.5, window=1, kernel=1, min_tokens=4)
    assert keep(method, info(8), mass) == [[1, 3, 4, 7]]


def test_pooling_keeps_the_neighbours_of_a_peak() -> None:
    mass = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]])
    method = SnapKV(budget=4 / 12, window=1, kernel=3, min_tokens=1)
    assert keep(method, info(12), mass) == [[2, 3, 4, 11]]


def test_average_pooling_counts_what_lies_beyond_the_ends_as_zero() -> None:
    """Means of three: 4/3, 2, 2/3, 2/3, 1.5, 1.5, 1.5, 0; the window is not pooled."""
    mass = torch.tensor([[4.0, 0.0, 2.0, 0.0, 0.0, 4.5, 0.0, 0.0, 9.0]])
    method = SnapKV(budget=4 / 9, window=1, kernel=3, pooling="avg", min_tokens=1)
    assert keep(method, info(9), mass) == [[1, 5, 6, 8]]


def test_of_equal_scores_the_more_recent_stays() -> None:
    method = SnapKV(budget=0.5, window=1, kernel=1, min_tokens=4)
    assert keep(method, info(8), torch.zeros(1, 8)) == [[4, 5, 6, 7]]


def test_kv_heads_choose_apart_and_query_heads_of_a_group_together() -> None:
    mass = torch.zeros(4, 8)  # 2 kv heads of 2 query heads each
    mass[0, 0], mass[1, 1] = 1.0, 0.6  # group 0: mean 0.5 at 0, 0.3 at 1
    mass[2, 2], mass[3, 2], mass[2, 3] = 0.2, 0.2, 0.3  # group 1: 0.2 at 2, 0.15 at 3
    method = SnapKV(budget=0.375, window=1, kernel=1, min_tokens=3)
    kept = keep(method, info(8, kv_heads=2, group_size=2), mass)
    assert kept == [[0, 1, 7], [2, 3, 7]]


def test_a_short_prompt_shrinks_the_window_and_says_so() -> None:
    state = SnapKV(budget=0.5, window=32, min_tokens=8).open(info(64))
    assert state.notes == ("window",)
    assert state.wants.window_queries == 8  # 32 tokens kept, a quarter of them the window


def test_the_searched_knob_comes_before_the_budget() -> None:
    method = SnapKV(budget=0.33, nominal=0.5, window=1, kernel=1, min_tokens=1)
    mass = torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.3, 0.0, 0.0, 0.0]])
    assert keep(method, info(8), mass) == [[1, 3, 4, 7]]
    state = SnapKV(budget=0.33, nominal=1.0).open(info(64))
    assert (state.notes, state.place(0, Captures()).tokens) == ((), None)


def test_a_prompt_shorter_than_the_least_is_kept_and_said_so() -> None:
    state = SnapKV(budget=0.33, min_tokens=8).open(info(6))
    assert state.notes == ("unreachable",)
    assert state.place(0, Captures()).tokens is None


def test_a_budget_too_tight_is_exceeded_and_said_so() -> None:
    state = SnapKV(budget=0.1, min_tokens=8).open(info(100, expected=60))
    assert "unreachable" in state.notes
    mass = torch.rand(1, 100)
    assert kept_by(state, info(100, expected=60), mass).shape == (1, 8)


@pytest.mark.parametrize("prompt", [1, 2, 7, 8, 9, 31, 32, 33, 64])
def test_keep_everything_asks_for_nothing(prompt: int) -> None:
    state = SnapKV(budget=1.0).open(info(prompt))
    assert state.wants.window_queries == 0
    assert state.notes == ()
    assert state.place(0, Captures()).tokens is None


@pytest.mark.parametrize(
    "fields",
    [
        {"kernel": 4},
        {"kernel": 0},
        {"window": 0},
        {"min_tokens": 0},
        {"pooling": "sum"},
        {"budget": 0.01},
        {"nominal": 1.5},
    ],
)
def test_refused_parameters(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="snapkv"):
        SnapKV(**fields)


def literal(
    mass: torch.Tensor, groups: int, window: int, kernel: int, pooling: str, capacity: int
) -> list[list[int]]:
    """SnapKV once more with plain loops: mean over the group, pool, sort, cut."""
    heads, prompt = mass.shape
    kept = []
    for kv_head in range(heads // groups):
        rows = mass[kv_head * groups : (kv_head + 1) * groups].tolist()
        mean = [sum(row[i] for row in rows) / groups for i in range(prompt - window)]
        near = [mean[max(0, i - kernel // 2) : i + kernel // 2 + 1] for i in range(len(mean))]
        pooled = [max(part) if pooling == "max" else sum(part) / kernel for part in near]
        ranked = sorted(range(len(mean)), key=lambda i: (-pooled[i], -i))
        kept.append(sorted(ranked[: capacity - window]) + list(range(prompt - window, prompt)))
    return kept


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    prompt=st.integers(9, 90),
    kv_heads=st.integers(1, 3),
    group_size=st.sampled_from([1, 2, 4]),
    budget=st.floats(0.1, 0.95),
    kernel=st.sampled_from([1, 3, 7, 63]),
    pooling=st.sampled_from(["max", "avg"]),
    window=st.integers(1, 40),
)
def test_equals_the_literal_form(
    seed: int,
    prompt: int,
    kv_heads: int,
    group_size: int,
    budget: float,
    kernel: int,
    pooling: str,
    window: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Multiples of the kernel, divided by 8: means and averages are exact, and ties are real ties.
    mass = kernel * torch.randint(0, 9, (kv_heads * group_size, prompt), generator=generator) / 8
    method = SnapKV(budget=budget, window=window, kernel=kernel, pooling=pooling, min_tokens=1)
    about = info(prompt, kv_heads=kv_heads, group_size=group_size)
    capacity = max(1, method.capacity(about))
    if capacity >= prompt:
        return
    used = min(window, max(1, capacity // 4))
    assert keep(method, about, mass) == literal(mass, group_size, used, kernel, pooling, capacity)
