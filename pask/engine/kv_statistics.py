"""The channel statistics that low keys are freed of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.paged import KeyShift
from pask.engine.kv_seat import KVShape

LEAST_SPREAD = 2.0**-6
"""A channel that hardly varies over the prompt is scaled by this, not by its own spread: a later
key that does differ would leave the range of the fp16 zeros and scales, and spoil its group."""


class KeyStatistics:
    """Mean and standard deviation of each key channel over a prompt, by layer, seat and kv head.

    fp16, [layers, seats, kv_heads, head_dim]; 0 and 1 for a seat without any, which leaves its
    keys as they are.
    """

    def __init__(self, shape: KVShape, seats: int, device: torch.device | str) -> None:
        size = (shape.layers, seats, shape.kv_heads, shape.head_dim)
        with torch.inference_mode(False):
            self.center = torch.zeros(size, dtype=torch.float16, device=device)
            self.spread = torch.ones(size, dtype=torch.float16, device=device)

    def measure(self, layer: int, seats: Sequence[int], keys: torch.Tensor) -> None:
        """From all prompt keys [kv_heads, P, head_dim] as they are stored; population std."""
        wide = keys.float()
        center = wide.mean(dim=1)
        spread = (wide - center[:, None]).square_().mean(dim=1).sqrt_()
        for seat in seats:
            self.center[layer, seat] = center
            self.spread[layer, seat] = spread.clamp(min=LEAST_SPREAD)

    def copy(self, source: int, target: int) -> None:
        for part in (self.center, self.spread):
            part[:, target] = part[:, source]

    def clear(self, seat: int) -> None:
        self.center[:, seat] = 0.0
        self.spread[:, seat] = 1.0

    def shift(self, layer: int) -> KeyShift:
        return KeyShift(self.center[layer], self.spread[layer])
