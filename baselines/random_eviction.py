"""Random eviction: what a choice among the older tokens is worth at all.

A floor without a paper. The first `sinks` and the last `recent` tokens stay; of the rest, chance
decides: at the prompt's end a uniform choice, and at every decode step one of the older resident
tokens is dropped, each as likely as the others, in every layer and kv head apart.

Deviations and open choices:
- C = round(B (P + T + s) - s) tokens in all, with P prompt tokens, T expected answer tokens and s
  free slots in a last page on average (half of it less one); at B = 1 nothing is dropped;
- C below `min_tokens` is raised to it, which exceeds the budget (note "unreachable");
- a C too small for the protected tokens leaves at most a quarter of it to the sinks and half to
  the recent tokens (note "window");
- the draws follow from `seed`, the layer and the prompt's length alone, so that an answer does not
  depend on what else is decoded, or in what order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import torch

from pask.methods.contract import (
    UNREACHABLE,
    Captures,
    Method,
    Placement,
    PromptInfo,
    RequestState,
)
from pask.methods.full import FullKV
from pask.methods.selection import bounded, top


@dataclass(frozen=True)
class RandomEviction(Method):
    """`sinks` first and `recent` last tokens are protected; `min_tokens` is the least C however
    tight the budget; `seed` decides every draw."""

    budget: float = 0.33
    sinks: int = 4
    recent: int = 32
    min_tokens: int = 8
    seed: int = 0

    name: ClassVar[str] = "random"
    label: ClassVar[str] = "Random"
    paper: ClassVar[str] = "a floor, without a paper"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "tokens kept per layer and kv head, of prompt and answer"
    budgets: ClassVar[tuple[float, float]] = (0.05, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.sinks, self.recent) < 0 or self.min_tokens < 1:
            raise ValueError("random: sinks and recent must be at least 0, min_tokens at least 1")

    def wanted(self, info: PromptInfo) -> int:
        """Tokens to keep so that B_persist meets the budget at the expected length."""
        return bounded(self.setting, info)

    def open(self, info: PromptInfo) -> RequestState:
        if self.setting >= 1:
            return FullKV().open(info)
        return _RandomRequest(self, info)


class _RandomRequest(RequestState):
    evicts = True

    def __init__(self, method: RandomEviction, info: PromptInfo) -> None:
        self.info, self._seed = info, method.seed
        wanted = method.wanted(info)
        self.capacity = max(wanted, method.min_tokens)
        self.sinks = min(method.sinks, self.capacity // 4)
        self._last = min(method.recent, max(1, self.capacity // 2))
        notes = []
        if wanted < self.capacity:
            notes.append(UNREACHABLE)
        if (self.sinks, self._last) != (method.sinks, method.recent):
            notes.append("window")
        self.notes = tuple(notes)
        self._steps = self._draws("steps")
        held = min(self.capacity, info.prompt_tokens)
        # The resident tokens of each layer and kv head, ascending.
        self._tokens = torch.arange(held).repeat(info.layers, info.kv_heads, 1)

    def place(self, layer: int, captures: Captures) -> Placement:
        info, prompt = self.info, self.info.prompt_tokens
        if prompt <= self.capacity:
            return Placement()
        older = prompt - self._last
        lots = torch.rand(info.kv_heads, older, generator=self._draws(str(layer)))
        lots[:, : self.sinks] = torch.inf
        last = torch.arange(older, prompt).expand(info.kv_heads, -1)
        self._tokens[layer] = torch.cat([top(lots, self.capacity - self._last), last], dim=-1)
        return Placement.high(self._tokens[layer].clone())

    def evict(self, tokens: int, mass: torch.Tensor | None) -> torch.Tensor | None:
        layers, kv_heads, held = self._tokens.shape
        new = torch.full((layers, kv_heads, 1), tokens - 1)
        together = torch.cat([self._tokens, new], dim=-1)
        if held < self.capacity:
            self._tokens = together
            return None
        drawn = torch.randint(
            self.sinks, held + 1 - self._last, (layers, kv_heads, 1), generator=self._steps
        )
        left = torch.arange(held)
        self._tokens = together.gather(-1, left + (left >= drawn))
        return together.gather(-1, drawn)

    def _draws(self, what: str) -> torch.Generator:
        key = f"{self._seed} {what} {self.info.prompt_tokens}"
        return torch.Generator().manual_seed(random.Random(key).getrandbits(63))
