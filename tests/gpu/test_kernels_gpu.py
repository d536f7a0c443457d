"""The common grid of the paged operations, compiled and on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kernels.paged import ChannelPages, HighPages, LowPages
from tests.cpu.kernel_cases import AttentionCase, attention_case, load_body
from tests.cpu.test_kernels import (
    RUNS,
    expected,
    test_a_plain_shift_changes_no_bit,
    test_a_row_does_not_depend_on_its_company,
    test_a_row_does_not_depend_on_the_size_of_a_ring,
    test_append_bounds,
    test_append_high,
    test_append_low_to_the_bit,
    test_attention,
    test_choose_slots,
    test_column_mass,
    test_no_rows_no_answer,
    test_window_mass,
)
from tests.cpu.triton_interpreted import (
    test_large_and_small_numbers_lose_nothing,
    test_neither_company_nor_a_wider_table_changes_a_bit,
    test_pages_that_no_kernel_reads_are_refused,
    test_slabs_of_rows_change_no_bit,
)

__all__ = [
    "expected",
    "test_a_plain_shift_changes_no_bit",
    "test_a_row_does_not_depend_on_its_company",
    "test_a_row_does_not_depend_on_the_size_of_a_ring",
    "test_append_bounds",
    "test_append_high",
    "test_append_low_to_the_bit",
    "test_attention",
    "test_choose_slots",
    "test_column_mass",
    "test_large_and_small_numbers_lose_nothing",
    "test_neither_company_nor_a_wider_table_changes_a_bit",
    "test_no_rows_no_answer",
    "test_pages_that_no_kernel_reads_are_refused",
    "test_slabs_of_rows_change_no_bit",
    "test_window_mass",
]


def _to(thing: Any, device: str) -> Any:
    """Tensors on the device, inside dataclasses, lists and tuples too."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, list | tuple):
        return type(thing)(_to(item, device) for item in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(
            thing, **{each.name: _to(getattr(thing, each.name), device) for each in fields(thing)}
        )
    return thing


def _there_and_back(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation on CPU tensors, computed on the device; what it writes comes back too."""

    def call(*args: Any, **options: Any) -> Any:
        moved = _to(args, "cuda")
        answer = operation(*moved, **_to_values(options))
        for here, there in zip(args, moved, strict=True):
            if isinstance(here, HighPages):
                here.data.copy_(there.data)
            elif isinstance(here, LowPages | ChannelPages):
                here.codes.copy_(there.codes)
                here.ranges.copy_(there.ranges)
        return _to(answer, "cpu")

    return call


def _to_values(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _to(value, "cuda") for name, value in options.items()}


@pytest.fixture
def body() -> SimpleNamespace:
    kernels = load_body("triton")
    return SimpleNamespace(
        **{name: _there_and_back(getattr(kernels, name)) for name in kernels.__all__}
    )


@pytest.fixture
def case() -> AttentionCase:
    return attention_case(RUNS).to("cuda")


def _attend(case: AttentionCase) -> torch.Tensor:
    out: torch.Tensor = load_body("triton").paged_attention(
        case.q, case.sequence, case.regions, case.shift
    )
    return out


def test_the_host_never_waits_for_the_device(case: AttentionCase) -> None:
    kernels = load_body("triton")
    high = next(r for r in case.regions if isinstance(r.pages, HighPages))
    low = next(r for r in case.regions if isinstance(r.pages, LowPages))
    rows, heads = high.stop.shape
    k = torch.randn(rows, heads, 64, device="cuda")
    slot = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None].repeat(1, heads)
    _attend(case)  # compiling may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        _attend(case)
        kernels.append_high(high.pages, high.table, case.sequence, slot, k, k)
        kernels.append_low(low.pages, low.table, case.sequence, slot, k, k, case.shift)
        kernels.append_bounds(high.pages, high.table, case.sequence, slot, k, 4)
        kernels.choose_slots(case.q, case.sequence, high, high.stop, 4, 16, 20)
        kernels.column_mass(k.transpose(0, 1), k.transpose(0, 1))
        kernels.window_mass(k.transpose(0, 1), k.transpose(0, 1), 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_gives_the_same_bits(case: AttentionCase) -> None:
    wanted = _attend(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _attend(case)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def test_repeated_calls_give_the_same_bits(case: AttentionCase) -> None:
    wanted = _attend(case)
    assert all(torch.equal(_attend(case), wanted) for _ in range(20))
