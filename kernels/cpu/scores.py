"""Attention over the prompt summed by key: torch's matrix product, the rest in one native pass."""

from __future__ import annotations

import torch

from kernels.cpu.library import operation, ready

QUERY_BLOCK = 64
"""Queries at once: their scores over one kv head's keys stay in a core's cache."""


def window_mass(q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    """`kernels.reference.window_mass`."""
    mass = torch.zeros(q.shape[0], q.shape[1], dtype=torch.float32)
    prompt = q.shape[1]
    _add_mass(q, k, max(prompt - window, 0), prompt, mass)
    return mass


def column_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`kernels.reference.column_mass`."""
    mass = torch.zeros(q.shape[0], q.shape[1], dtype=torch.float32)
    _add_mass(q, k, 0, q.shape[1], mass)
    return mass


def _add_mass(q: torch.Tensor, k: torch.Tensor, first: int, last: int, mass: torch.Tensor) -> None:
    """Add the softmaxes of queries first .. last over the keys that each sees to mass."""
    group, prompt, head_dim = q.shape[0] // k.shape[0], q.shape[1], q.shape[2]
    scaled = (q.float() * head_dim**-0.5).view(k.shape[0], group, prompt, head_dim)
    keys = k.float().transpose(1, 2)
    add = operation("pask_softmax_columns")
    for start in range(first, last, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, last)
        for head in range(k.shape[0]):
            late = scaled[head, :, start:stop].reshape(-1, head_dim)
            scores = ready(late @ keys[head, :, :stop], torch.float32)
            sums = mass[head * group]
            add(
                (
                    *(scores.data_ptr(), group, stop - start, stop),
                    *(sums.data_ptr(), mass.shape[1], torch.get_num_threads()),
                )
            )
