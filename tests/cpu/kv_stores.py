"""Small KV stores, and prompts and steps of random numbers for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pask.engine.kv_seat import CHANNEL2
from pask.engine.kv_store import KVShape, KVStore, Run, Seat
from pask.methods.contract import Placement
from pask.methods.levels import LOW_LEVELS, Level

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=32)
Q_HEADS = 6
SLOT = 2 * 2 * 3 * 32 * 2  # all layers' bytes of one HIGH slot: key and value, 3 heads of 32
LOW4 = frozenset({Level.LOW4})
BELOW = (Level.HIGH, Level.LOW4, Level.LOW2, Level.RELEASE)


def new_store(capacity: int = 512, *, page: int = 4, seats: int = 6, **rest: object) -> KVStore:
    mix = dict.fromkeys((Level.HIGH, *LOW_LEVELS, CHANNEL2), 1.0)
    options: dict[str, object] = {"seats": seats, "max_tokens": 128, "page_slots": page, **rest}
    return KVStore.sized(SHAPE, capacity, mix, **options)


def prompt_numbers(tokens: int, seed: int = 0) -> torch.Tensor:
    """[layers, 2 (key, value), kv_heads, tokens, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    size = (SHAPE.layers, 2, SHAPE.kv_heads, tokens, SHAPE.head_dim)
    return 3 * torch.randn(size, generator=generator)


def fill(
    store: KVStore, seats: Seat | Sequence[Seat], placement: Placement | None = None, seed: int = 0
) -> None:
    together = [seats] if isinstance(seats, Seat) else seats
    numbers = prompt_numbers(together[0].prompt_tokens, seed)
    for layer in range(SHAPE.layers):
        store.add_prompt(together, layer, *numbers[layer], placement)


def row_numbers(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of some rows in all layers, [layers, rows, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(SHAPE.layers, rows, heads, SHAPE.head_dim, generator=generator)
        for heads in (Q_HEADS, SHAPE.kv_heads, SHAPE.kv_heads)
    )
    return q, 3 * k, v


def feed(
    store: KVStore,
    runs: Sequence[Run],
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, np.ndarray]:
    """One step; what attention gives, [layers, rows, q_heads, head_dim], and bytes by row."""
    q, k, v = numbers
    step = store.begin(runs)
    out = [step.attend(layer, q[layer], k[layer], v[layer]) for layer in range(SHAPE.layers)]
    step.finish()
    return torch.stack(out), step.resident_bytes


def rows(
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor], these: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (part[:, these] for part in numbers)
    return q, k, v


def random_levels(count: int, levels: Sequence[Level], seed: int) -> np.ndarray:
    """[count, layers] int8."""
    chosen = np.random.default_rng(seed).choice(
        [int(level) for level in levels], size=(count, SHAPE.layers)
    )
    return chosen.astype(np.int8)


def same(store: KVStore, one: Seat, other_store: KVStore, other: Seat) -> bool:
    """Whether two seats hold the same, slot by slot and bit by bit."""
    for layer in range(SHAPE.layers):
        left, right = store.dense(one, layer), other_store.dense(other, layer)
        if left.keys() != right.keys():
            return False
        for kind, parts in left.items():
            if not all(map(torch.equal, parts, right[kind])):
                return False
    return store.resident_bytes(one) == other_store.resident_bytes(other)


def kept(count: int, prompt: int) -> torch.Tensor:
    """`count` of the tokens in each kv head, not the same ones."""
    return torch.stack(
        [torch.arange(prompt).roll(head)[:count].sort().values for head in range(SHAPE.kv_heads)]
    )
