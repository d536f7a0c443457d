"""Attention over the prompt summed by key: torch's matrix product, the rest in one native pass."""

from __future__ import annotations

import torch

from kernels.cpu.library import operation, ready
from kernels.reference.scores import QUERY_BLOCK


def window_mass(q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    """`kernels.reference.window_mass`."""
    mass = torch.zeros(q.shape[0], q.shape[1], dtype=torch.float32)
    _add_mass(q, k.float(), min(window, q.shape[1]), mass)
    return mass


def column_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`kernels.reference.column_mass`."""
    prompt = q.shape[1]
    mass = torch.zeros(q.shape[0], prompt, dtype=torch.float32)
    k = k.float()
    for start in range(0, prompt, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, prompt)
        _add_mass(q[:, :stop], k[:, :stop], stop - start, mass)
    return mass


def _add_mass(q: torch.Tensor, k: torch.Tensor, rows: int, mass: torch.Tensor) -> None:
    """Add the last `rows` queries' softmaxes over all keys of k to the first columns of mass."""
    q_heads, keys, head_dim = q.shape
    late = q[:, keys - rows :].float().reshape(k.shape[0], -1, head_dim)
    scores = ready((late * head_dim**-0.5) @ k.transpose(1, 2), torch.float32)
    operation("pask_softmax_columns")(
        (
            *(scores.data_ptr(), q_heads, rows, keys),
            *(mass.data_ptr(), mass.shape[1], torch.get_num_threads()),
        )
    )
