"""Rotary position embedding, in the half-split form of the Llama family."""

from __future__ import annotations

import math

import torch

from pask.engine.layout import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] fp32: theta^(-2i / head_dim), rescaled band by band in the llama3 form.

    llama3: wavelengths beyond original_positions / low_freq_factor are slowed down by `factor`,
    those below original_positions / high_freq_factor stay, those between are blended linearly in
    original_positions / wavelength.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.original_positions is None:
        return plain
    turns = rope.original_positions * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


class RopeTable:
    """cos and sin of every position so far, so that a position has one value wherever it is met."""

    _GROWTH = 1024

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._cos = self._sin = torch.empty(0, head_dim)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin: [rows, 1, head_dim] fp32 for int64 `positions` [rows]."""
        top = int(positions.max())
        if top >= len(self._cos):
            size = (top // self._GROWTH + 1) * self._GROWTH
            angles = torch.arange(size, dtype=torch.float32)[:, None] * self._frequencies
            angles = torch.cat((angles, angles), dim=-1)
            self._cos, self._sin = angles.cos(), angles.sin()
        return self._cos[positions, None], self._sin[positions, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [rows, heads, head_dim] by its rows' angles: x * cos + (-x2, x1) * sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
