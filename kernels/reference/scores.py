"""Attention over the prompt, summed by key, and over one contiguous sequence."""

from __future__ import annotations

import torch

QUERY_BLOCK = 128
"""Queries whose scores over the whole prompt exist at a time."""


def window_mass(q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    """Attention mass that the last `window` prompt queries put on every prompt key.

    With P prompt tokens and n = min(window, P) queries, for each query head h

        mass[h, j] = sum_{i = P-n}^{P-1} softmax(q[h, i] . K[h // group]^T / sqrt(d))[j]

    where query i's softmax runs over the keys 0 .. i that it may see (SnapKV, arXiv:2404.14469,
    section 4, before its pooling).

    q: [q_heads, P, head_dim], k: [kv_heads, P, head_dim]; answers [q_heads, P] fp32, each row
    adding up to n.
    """
    q_heads, prompt, head_dim = q.shape
    kv_heads = k.shape[0]
    rows = min(window, prompt)
    late = q[:, prompt - rows :].float().reshape(kv_heads, -1, head_dim)
    scores = (late * head_dim**-0.5) @ k.float().transpose(1, 2)
    scores = scores.view(q_heads, rows, prompt)
    key = torch.arange(prompt, device=q.device)
    query = key[prompt - rows :, None]
    scores.masked_fill_(key > query, float("-inf"))
    return torch.softmax(scores, dim=-1).sum(dim=1)


def column_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Attention mass that all prompt queries together put on every prompt key:

        mass[h, j] = sum_{i = j}^{P-1} softmax(q[h, i] . K[h // group]^T / sqrt(d))[j]

    where query i's softmax runs over the keys 0 .. i (H2O, arXiv:2306.14048, algorithm 1: the
    accumulated scores after the prompt). Computed for one block of queries at a time: no
    [P, P] tensor exists.

    q: [q_heads, P, head_dim], k: [kv_heads, P, head_dim]; answers [q_heads, P] fp32, each row
    adding up to P.
    """
    q_heads, prompt, _ = q.shape
    mass = torch.zeros(q_heads, prompt, dtype=torch.float32, device=q.device)
    for start in range(0, prompt, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, prompt)
        mass[:, :stop] += window_mass(q[:, :stop], k[:, :stop], stop - start)
    return mass
