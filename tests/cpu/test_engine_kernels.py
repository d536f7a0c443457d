"""Attention over one contiguous sequence against naive sums over single queries and keys."""

from __future__ import annotations

import pytest
import torch

from kernels import decode_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decode_attention_reads_the_stored_values_and_no_others(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    q = torch.randn(2, 3, 16)
    k, v = torch.randn(2, 50, 16).to(dtype), torch.randn(2, 50, 16).to(dtype)
    expected = torch.zeros(2, 3, 16, dtype=torch.float64)
    for head in range(2):
        for member in range(3):
            scores = k[head].double() @ q[head, member].double() / 4.0
            weights = scores.exp() / scores.exp().sum()
            expected[head, member] = weights @ v[head].double()
    out = decode_attention(q, k, v)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_decode_attention_does_not_depend_on_the_order_of_the_slots() -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 3, 16), torch.randn(2, 50, 16), torch.randn(2, 50, 16)
    order = torch.randperm(50)
    torch.testing.assert_close(
        decode_attention(q, k[:, order], v[:, order]), decode_attention(q, k, v)
    )
