"""The operations the engine is made of: one operation, one name, several bodies.

`kernels.reference` defines them in plain torch; `kernels.cpu` (native) and `kernels.triton` (GPU)
compute the same faster, and are taken where they can be (`kernels.bodies`). `kernels.paged` says
what they read and write. Every argument is described where the operation is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from kernels.bodies import Body, body, operations
from kernels.paged import ChannelPages, HighPages, KeyShift, LowPages, Region

__all__ = [
    "Body",
    "append_bounds",
    "append_high",
    "append_low",
    "body",
    "choose_slots",
    "column_mass",
    "paged_attention",
    "put_channel",
    "window_mass",
]


def append_high(
    pages: HighPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Write keys and values into slots (`kernels.reference.append_high`)."""
    operations(k.device.type).append_high(pages, table, sequence, slot, k, v)


def append_low(
    pages: LowPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shift: KeyShift | None,
) -> None:
    """Quantise keys and values into slots (`kernels.reference.append_low`)."""
    operations(k.device.type).append_low(pages, table, sequence, slot, k, v, shift)


def put_channel(pages: ChannelPages, page: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Quantise groups of 32 tokens, keys by channel (`kernels.reference.put_channel`)."""
    operations(k.device.type).put_channel(pages, page, k, v)


def append_bounds(
    pages: HighPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    chunk: int,
) -> None:
    """Widen chunk summaries by keys (`kernels.reference.append_bounds`)."""
    operations(k.device.type).append_bounds(pages, table, sequence, slot, k, chunk)


@overload
def paged_attention(
    q: torch.Tensor,
    sequence: torch.Tensor,
    regions: Sequence[Region],
    shift: KeyShift | None = None,
    *,
    chosen: torch.Tensor | None = None,
    probabilities: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def paged_attention(
    q: torch.Tensor,
    sequence: torch.Tensor,
    regions: Sequence[Region],
    shift: KeyShift | None = None,
    *,
    chosen: torch.Tensor | None = None,
    probabilities: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def paged_attention(
    q: torch.Tensor,
    sequence: torch.Tensor,
    regions: Sequence[Region],
    shift: KeyShift | None = None,
    *,
    chosen: torch.Tensor | None = None,
    probabilities: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend over all slots that rows see (`kernels.reference.paged_attention`)."""
    answer: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    answer = operations(q.device.type).paged_attention(
        q, sequence, regions, shift, chosen=chosen, probabilities=probabilities
    )
    return answer


def choose_slots(
    q: torch.Tensor,
    sequence: torch.Tensor,
    bounds: Region,
    stop: torch.Tensor,
    chunk: int,
    channels: int,
    count: int,
) -> torch.Tensor:
    """Slots whose chunks promise most attention (`kernels.reference.choose_slots`)."""
    answer: torch.Tensor = operations(q.device.type).choose_slots(
        q, sequence, bounds, stop, chunk, channels, count
    )
    return answer


def window_mass(q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    """The last queries' attention summed by key (`kernels.reference.window_mass`)."""
    answer: torch.Tensor = operations(q.device.type).window_mass(q, k, window)
    return answer


def column_mass(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """All queries' attention summed by key (`kernels.reference.column_mass`)."""
    answer: torch.Tensor = operations(q.device.type).column_mass(q, k)
    return answer
