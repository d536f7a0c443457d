"""The grid of `test_kernels` on Triton's interpreter; `test_triton_kernels` runs it apart.

Triton decides at its import whether kernels are compiled or interpreted, so TRITON_INTERPRET has
to be set before anything imports it, and not in a process that runs other tests.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kernels.paged import HighPages, LowPages
from tests.cpu.kernel_cases import (
    AttentionCase,
    AttentionSpec,
    RegionSpec,
    attention_case,
    load_body,
    naive_attention,
)
from tests.cpu.test_kernels import (
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
    test_put_channel_to_the_bit,
    test_window_mass,
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
    "test_no_rows_no_answer",
    "test_put_channel_to_the_bit",
    "test_window_mass",
]


@pytest.fixture
def body() -> ModuleType:
    return load_body("triton")


RUN = AttentionSpec(
    (
        RegionSpec("fp16", (270, 271, 9)),
        RegionSpec("fp16", (5, 5, 2), first=(30, 31, 3), ring=16),
        RegionSpec("low4", (20, 21, 0)),
    ),
    sequences=(1, 1, 0),
    kv_heads=1,
    shift=True,
)


def _answer(case: AttentionCase, body: ModuleType) -> torch.Tensor:
    out: torch.Tensor = body.paged_attention(case.q, case.sequence, case.regions, case.shift)
    return out


def test_neither_company_nor_a_wider_table_changes_a_bit(body: ModuleType) -> None:
    case = attention_case(RUN)
    out = _answer(case, body)
    assert torch.equal(_answer(case.rows([1]), body), out[1:2])
    wider = [
        replace(region, table=torch.cat((region.table, torch.full_like(region.table, -1)), 2))
        for region in case.regions
    ]
    assert torch.equal(_answer(replace(case, regions=wider), body), out)


def test_slabs_of_rows_change_no_bit(body: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.triton import attention

    case = attention_case(RUN)
    out = _answer(case, body)
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 1)
    assert torch.equal(_answer(case, body), out)


def test_large_and_small_numbers_lose_nothing(body: ModuleType) -> None:
    """Queries beyond fp16 and below it, values of every size, weights of any size beside 1."""
    case = attention_case(
        AttentionSpec((RegionSpec("fp16", (40,)), RegionSpec("low4", (40,))), kv_heads=1, group=2)
    )
    case = replace(case, q=case.q * torch.tensor([1e6, 1e-6])[:, None])
    high, low = (region.pages for region in case.regions)
    assert isinstance(high, HighPages)
    assert isinstance(low, LowPages)
    high.data[:, 0] *= 1e-6
    low.ranges[:, 0] *= 2e-6
    high.data[:, 1, ::2] *= 1000
    low.ranges[:, 1, ::2] *= 1000
    wanted = torch.from_numpy(naive_attention(case).out)
    torch.testing.assert_close(_answer(case, body).double(), wanted, rtol=2e-5, atol=2e-5)


def test_pages_that_no_kernel_reads_are_refused(body: ModuleType) -> None:
    case = attention_case(AttentionSpec((RegionSpec("fp32", (4,)),)))
    pages = HighPages(torch.zeros(2, 2, 16, 64, dtype=torch.float64))
    case = replace(case, regions=[replace(case.regions[0], pages=pages)])
    with pytest.raises(ValueError, match="float64"):
        _answer(case, body)
