"""The first few tokens and the most recent ones: what a method has to beat without any scores.

Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks",
arXiv 2309.17453 (StreamingLLM). The first `sinks` tokens draw attention whatever they say and stay
for ever; beside them a window of the latest tokens slides along, over the prompt and the answer.

Deviations and open choices:
- original positions: the paper rotates keys by their place within the cache, which lets it go on
  beyond the model's context; no request here does;
- the prompt is read with exact attention and cut once, at its end;
- C = round(B (P + T + s) - s) tokens in all, with P prompt tokens, T expected answer tokens and s
  free slots in a last page on average (half of it less one); at B = 1 nothing is dropped;
- C below `min_tokens` is raised to it, which exceeds the budget (note "unreachable");
- of a C that the sinks alone would fill, one token is left for the most recent (note "sinks").
"""

from __future__ import annotations

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
from pask.methods.selection import bounded


@dataclass(frozen=True)
class SinksRecent(Method):
    """`sinks` as in the paper; `min_tokens` is the least C however tight the budget."""

    budget: float = 0.33
    sinks: int = 4
    min_tokens: int = 8

    name: ClassVar[str] = "sinks_recent"
    label: ClassVar[str] = "Sinks + recent"
    paper: ClassVar[str] = "Xiao et al. 2023, arXiv 2309.17453"
    color: ClassVar[str] = "#56b4e9"
    marker: ClassVar[str] = "X"
    knob: ClassVar[str] = "tokens kept per layer and kv head, of prompt and answer"
    budgets: ClassVar[tuple[float, float]] = (0.05, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0 or self.min_tokens < 1:
            raise ValueError("sinks_recent: sinks must be at least 0, min_tokens at least 1")

    def wanted(self, info: PromptInfo) -> int:
        """Tokens to keep so that B_persist meets the budget at the expected length."""
        return bounded(self.setting, info)

    def open(self, info: PromptInfo) -> RequestState:
        if self.setting >= 1:
            return FullKV().open(info)
        return _SinksRecentRequest(self, info)


class _SinksRecentRequest(RequestState):
    evicts = True

    def __init__(self, method: SinksRecent, info: PromptInfo) -> None:
        self.info = info
        wanted = method.wanted(info)
        self.capacity = max(wanted, method.min_tokens)
        self.sinks = min(method.sinks, self.capacity - 1)
        notes = []
        if wanted < self.capacity:
            notes.append(UNREACHABLE)
        if self.sinks < method.sinks:
            notes.append("sinks")
        self.notes = tuple(notes)

    def place(self, layer: int, captures: Captures) -> Placement:
        prompt = self.info.prompt_tokens
        if prompt <= self.capacity:
            return Placement()
        last = torch.arange(self._window_start(prompt), prompt)
        kept = torch.cat([torch.arange(self.sinks), last])
        return Placement.high(kept.expand(self.info.kv_heads, -1))

    def evict(self, tokens: int, mass: torch.Tensor | None) -> torch.Tensor | None:
        if tokens <= self.capacity:
            return None
        dropped = self._window_start(tokens) - 1
        return torch.full((self.info.layers, self.info.kv_heads, 1), dropped)

    def _window_start(self, tokens: int) -> int:
        return tokens - (self.capacity - self.sinks)
