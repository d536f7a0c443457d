"""Attention of prompt queries over the prompt, summed by key: two passes, no matrix kept.

The first pass finds every query's log-sum-exp, the second adds up, key block by key block, what
the queries that may see it give it. Each sum has one program and one order: no atomics.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.triton.jit import jit, jit_varying

# 64 x 64 scores are 32 registers a thread at 4 warps. Channels come 32 at a time, because an fp32
# product in TF32 parts needs several registers for each number that it multiplies.
CHUNK = tl.constexpr(32)
QUERIES, KEYS, WARPS = 64, 64, 4


@jit
def _block_scores(
    q: tl.tensor,
    k: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    prompt: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """scale * q . k of a block, -inf where the query comes before the key: [queries, keys] fp32.

    fp32 products go through the tensor cores in three TF32 parts, which costs no precision.
    """
    scores = tl.zeros([query.shape[0], key.shape[0]], tl.float32)
    for first in range(0, HEAD_DIM, CHUNK):
        channel = first + tl.arange(0, CHUNK)
        inside = (channel < HEAD_DIM)[None, :]
        q_at = query[:, None] * HEAD_DIM + channel[None, :]
        k_at = key[:, None] * HEAD_DIM + channel[None, :]
        queries = tl.load(q + q_at, mask=inside & (query < prompt)[:, None], other=0.0)
        keys = tl.load(k + k_at, mask=inside & (key < prompt)[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), acc=scores, input_precision="tf32x3")
    seen = (query[:, None] >= key[None, :]) & (query < prompt)[:, None]
    return tl.where(seen, scores * scale, float("-inf"))


@jit_varying("prompt", "first_query")
def _query_lse(
    q: tl.tensor,
    k: tl.tensor,
    lse: tl.tensor,
    prompt: tl.tensor,
    first_query: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """lse[head, query] = log2 of the sum of 2^score over the keys up to the query."""
    head = tl.program_id(1).to(tl.int64)
    first = first_query + tl.program_id(0) * QUERIES
    query = first + tl.arange(0, QUERIES)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for block in range(0, tl.minimum(first + QUERIES, prompt), KEYS):
        scores = _block_scores(
            q + head * prompt * HEAD_DIM,
            k + (head // group) * prompt * HEAD_DIM,
            query,
            block + tl.arange(0, KEYS),
            prompt,
            scale,
            HEAD_DIM,
        )
        # Queries of the prompt see key 0; those behind its end see none and are not stored.
        higher = tl.maximum(top, tl.max(scores, axis=1))
        steady = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(top - steady) + tl.sum(tl.exp2(scores - steady[:, None]), axis=1)
        top = higher
    present = query < prompt
    tl.store(
        lse + head * prompt + query, top + tl.log2(tl.where(present, total, 1.0)), mask=present
    )


@jit_varying("prompt", "first_query")
def _key_mass(
    q: tl.tensor,
    k: tl.tensor,
    lse: tl.tensor,
    mass: tl.tensor,
    prompt: tl.tensor,
    first_query: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """mass[head, key] = sum over the queries from first_query on of 2^(score - lse)."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * KEYS
    key = first + tl.arange(0, KEYS)
    total = tl.zeros([KEYS], tl.float32)
    for block in range(tl.maximum(first, first_query), prompt, QUERIES):
        query = block + tl.arange(0, QUERIES)
        scores = _block_scores(
            q + head * prompt * HEAD_DIM,
            k + (head // group) * prompt * HEAD_DIM,
            query,
            key,
            prompt,
            scale,
            HEAD_DIM,
        )
        known = tl.load(lse + head * prompt + query, mask=query < prompt, other=0.0)
        total += tl.sum(tl.exp2(scores - known[:, None]), axis=0)
    tl.store(mass + head * prompt + key, total, mask=key < prompt)


def window_mass(q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    """As `kernels.reference.window_mass`."""
    return _mass(q, k, max(0, q.shape[1] - window))


def column_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """As `kernels.reference.column_mass`; its only other tensor is [q_heads, P] too."""
    return _mass(q, k, 0)


def _mass(q: torch.Tensor, k: torch.Tensor, first_query: int) -> torch.Tensor:
    """The mass that the queries from `first_query` on put on every key: [q_heads, P] fp32."""
    q, k = q.float().contiguous(), k.float().contiguous()
    q_heads, prompt, head_dim = q.shape
    lse = torch.empty(q_heads, prompt, dtype=torch.float32, device=q.device)
    mass = torch.zeros_like(lse)
    if not prompt:
        return mass
    options = {
        "prompt": prompt,
        "first_query": first_query,
        "group": q_heads // k.shape[0],
        "scale": head_dim**-0.5 * math.log2(math.e),
        "HEAD_DIM": head_dim,
        "QUERIES": QUERIES,
        "KEYS": KEYS,
        "num_warps": WARPS,
        "num_stages": 2,  # one block of operands is multiplied while the next one comes
    }
    blocks = triton.cdiv(prompt - first_query, QUERIES)
    _query_lse[blocks, q_heads](q=q, k=k, lse=lse, **options)
    _key_mass[triton.cdiv(prompt, KEYS), q_heads](q=q, k=k, lse=lse, mass=mass, **options)
    return mass
