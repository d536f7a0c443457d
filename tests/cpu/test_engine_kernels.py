"""The reference operations against naive sums over single queries and keys."""

from __future__ import annotations

import pytest
import torch

from kernels import decode_attention, window_mass


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "prompt", "window"),
    [(4, 2, 37, 8), (6, 2, 5, 32), (3, 3, 1, 1), (8, 1, 20, 20)],
)
def test_window_mass_is_the_sum_of_the_last_queries_softmaxes(
    q_heads: int, kv_heads: int, prompt: int, window: int
) -> None:
    torch.manual_seed(prompt)
    q, k = torch.randn(q_heads, prompt, 16), torch.randn(kv_heads, prompt, 16)
    expected = torch.zeros(q_heads, prompt, dtype=torch.float64)
    for head in range(q_heads):
        keys = k[head // (q_heads // kv_heads)].double()
        for query in range(max(0, prompt - window), prompt):
            scores = keys[: query + 1] @ q[head, query].double() / 4.0
            weights = scores.exp() / scores.exp().sum()
            expected[head, : query + 1] += weights
    mass = window_mass(q, k, window)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), expected, rtol=1e-5, atol=1e-6)
    assert mass.sum(dim=1).tolist() == pytest.approx([min(window, prompt)] * q_heads)


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
