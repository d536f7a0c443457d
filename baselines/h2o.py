"""H2O: keep the recent tokens and those that have drawn the most attention so far.

Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models", arXiv 2306.14048. Every token carries the softmax probabilities that all queries
so far have put on it, the prompt's first, then each decoded one's. Of the prompt stay the last R
tokens and the K tokens of the highest sum before them. Each decode step reads the C + 1 = K + R + 1
resident tokens, adds its probabilities to their sums, and drops the lowest of those that are not
among the last R, prompt and decoded tokens alike.

Deviations and open choices:
- the sums themselves (fp32, 4 bytes a token and kv head) are the method's bookkeeping and are not
  counted as KV;
- sums per kv head, over its query heads' mean, and one kept set each; the original has one key head
  a query head and says nothing of shared ones. fp32 throughout;
- C follows from a byte budget instead of a share of the prompt: with P prompt tokens, T expected
  answer tokens and s free slots in a last page on average (half of it less one),
  C + s = B (P + T + s), hence C = round(B (P + T + s) - s); at B = 1 nothing is dropped, however
  long the answer gets;
- C below `min_tokens` is raised to it, which exceeds the budget (note "unreachable");
- K = floor(`heavy_share` C), R = C - K: half and half, as in the original's runs;
- `growing` lets C follow the length so far, C_t = round(B (P + t + s) - s): then T is not needed;
- off by default, and no part of H2O: `sinks` first tokens that stay, counted among the K;
  `decay`, by which the sums shrink at every decode step (the prompt's queries count in full);
  `lifetime`, which ranks a sum by its share of the queries that could see the token;
- original positions (keys are stored after RoPE), as without its streaming mode;
- equal sums: the later token stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from pask.methods.contract import (
    UNREACHABLE,
    Captures,
    Method,
    Placement,
    PromptInfo,
    RequestState,
    Wants,
)
from pask.methods.full import FullKV
from pask.methods.selection import bounded, by_kv_head, top


@dataclass(frozen=True)
class H2O(Method):
    """`heavy_share` of the C kept tokens are chosen by attention, the others are the last ones;
    `min_tokens` is the least C however tight the budget."""

    budget: float = 0.33
    heavy_share: float = 0.5
    min_tokens: int = 8
    growing: bool = False
    sinks: int = 0
    decay: float = 1.0
    lifetime: bool = False

    name: ClassVar[str] = "h2o"
    label: ClassVar[str] = "H2O"
    paper: ClassVar[str] = "Zhang et al. 2023, arXiv 2306.14048"
    color: ClassVar[str] = "#d55e00"
    marker: ClassVar[str] = "^"
    knob: ClassVar[str] = "tokens kept per layer and kv head, of prompt and answer"
    budgets: ClassVar[tuple[float, float]] = (0.05, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.heavy_share <= 1:
            raise ValueError(f"h2o: heavy_share must be within 0..1, not {self.heavy_share}")
        if self.min_tokens < 1 or self.sinks < 0:
            raise ValueError("h2o: min_tokens must be at least 1, sinks at least 0")
        if not 0 < self.decay <= 1:
            raise ValueError(f"h2o: decay must be above 0 and at most 1, not {self.decay}")

    def wanted(self, info: PromptInfo, new_tokens: int) -> int:
        """Tokens to keep so that B_persist meets the budget when `new_tokens` were decoded."""
        return bounded(self.setting, info, new_tokens)

    def open(self, info: PromptInfo) -> RequestState:
        if self.setting >= 1:
            return FullKV().open(info)
        return _H2ORequest(self, info)


class _H2ORequest(RequestState):
    evicts = True
    wants = Wants(prompt_mass=True, step_mass=True)

    def __init__(self, method: H2O, info: PromptInfo) -> None:
        self.method, self.info = method, info
        if method.wanted(info, info.expected_new_tokens) < method.min_tokens:
            self.notes = (UNREACHABLE,)
        self._held = min(self._capacity(0), info.prompt_tokens)
        # The sums of all tokens so far, [layers, kv_heads, room]; infinite where one was dropped.
        room = info.prompt_tokens + info.expected_new_tokens
        self._sums = torch.zeros(info.layers, info.kv_heads, room)

    def place(self, layer: int, captures: Captures) -> Placement:
        assert captures.prompt_mass is not None  # it was asked for
        prompt = self.info.prompt_tokens
        sums = by_kv_head(captures.prompt_mass, self.info)
        self._sums[layer, :, :prompt] = sums
        if self._held == prompt:
            return Placement()
        heavy, sinks = self._split(self._held)
        recent_from = prompt - (self._held - heavy)
        ranked = self._ranked(sums, prompt)[:, :recent_from].clone()
        ranked[:, :sinks] = torch.inf
        last = torch.arange(recent_from, prompt).expand(self.info.kv_heads, -1)
        kept = torch.cat([top(ranked, heavy), last], dim=-1)
        self._sums[layer, :, :prompt] = torch.full_like(sums, torch.inf).scatter(
            1, kept, sums.gather(1, kept)
        )
        return Placement.high(kept)

    def evict(self, tokens: int, mass: torch.Tensor | None) -> torch.Tensor | None:
        assert mass is not None  # it was asked for
        if tokens > self._sums.shape[-1]:
            self._sums = F.pad(self._sums, (0, max(64, tokens // 2)))
        sums = self._sums[:, :, :tokens]
        if self.method.decay < 1:
            sums *= self.method.decay
        sums.add_(mass, alpha=1 / self.info.group_size)
        self._held += 1
        capacity = self._capacity(tokens - self.info.prompt_tokens)
        if self._held <= capacity:
            return None
        heavy, sinks = self._split(capacity)
        candidates = self._ranked(sums, tokens)[..., sinks : tokens - (capacity - heavy)]
        # Of equal values argmin names the first.
        dropped = sinks + candidates.argmin(dim=-1, keepdim=True)
        sums.scatter_(2, dropped, torch.inf)
        self._held -= 1
        return dropped

    def _capacity(self, decoded: int) -> int:
        expected = decoded if self.method.growing else self.info.expected_new_tokens
        return max(self.method.min_tokens, self.method.wanted(self.info, expected))

    def _split(self, capacity: int) -> tuple[int, int]:
        """How many tokens stay by their sums, and how many of these are sinks."""
        heavy = math.floor(capacity * self.method.heavy_share)
        return heavy, min(self.method.sinks, heavy)

    def _ranked(self, sums: torch.Tensor, tokens: int) -> torch.Tensor:
        if not self.method.lifetime:
            return sums
        return sums / torch.arange(tokens, 0, -1)  # the queries that saw each token, its own too
