"""Tokens on their way from the recent window into a low region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels import append_low
from kernels.paged import KeyShift
from pask.engine.kv_plan import Leavers
from pask.engine.kv_seat import low_kind

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings


@dataclass(frozen=True)
class Moving:
    """`Leavers` as tensors on the store's device.

    Where they lie: page [layers, tokens, kv_heads], place [layers, tokens, 1]; where they go:
    target [layers, tokens, kv_heads] int32, -1 in layers where they end elsewhere.
    """

    kind: str
    fed_now: bool
    sequence: torch.Tensor
    page: torch.Tensor
    place: torch.Tensor
    target: torch.Tensor
    in_layer: tuple[bool, ...]  # whether any goes there

    @classmethod
    def prepared(cls, store: Holdings, leavers: Leavers) -> Moving:
        """For once the step has its pages."""
        page, place = store.seat_pages.at("recent", leavers.seats, leavers.ring.T)
        return cls(
            low_kind(leavers.level),
            leavers.fed_now,
            on_device(leavers.seats, store.device),
            torch.from_numpy(page.astype(np.int64)).to(store.device),
            torch.from_numpy(place.astype(np.int64)).to(store.device),
            by_head(leavers.target, store.shape.kv_heads, store.device),
            tuple(bool((targets >= 0).any()) for targets in leavers.target.T),
        )

    def quantise(self, store: Holdings, layer: int, shift: KeyShift | None) -> None:
        """Move those of a layer, starting from what 16 bit holds of them."""
        if not self.in_layer[layer]:
            return
        data = store.pool("recent").high.data
        page, place = self.page[layer], self.place[layer]
        append_low(
            store.pool(self.kind).low,
            store.seat_pages.tables[self.kind].layer(layer),
            self.sequence,
            self.target[layer],
            data[page, 0, place].float(),
            data[page, 1, place].float(),
            shift,
        )


def by_head(slots: np.ndarray, kv_heads: int, device: torch.device) -> torch.Tensor:
    """[rows, layers] as [layers, rows, kv_heads] int32 on a device."""
    by_layer = slots.T.astype(np.int32)[:, :, None]
    return on_device(np.repeat(by_layer, kv_heads, axis=2), device)


def on_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """As int32 on a device."""
    return torch.from_numpy(numbers.astype(np.int32, copy=False)).to(device)
