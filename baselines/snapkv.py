"""SnapKV: keep the prompt tokens that the end of the prompt looks at.

Source: Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation",
arXiv 2404.14469. At prefill end, per layer: attention probabilities of the last w prompt queries,
summed over those queries, averaged over the query heads that share a kv head, pooled along the
positions (kernel k), then the top (C - w) earlier positions and the whole window stay. Nothing
that is decoded later is evicted.

Deviations and open choices:
- one kept set per kv head, shared by its query group (the reference keeps one per query head and
  so stores `group_size` times the bytes); aggregate first, then pool; probabilities in fp32;
- w = 32, k = 7 and max pooling are the settings of the paper's long-context runs; the reference's
  own defaults differ (average pooling, k = 5). `pooling="avg"` divides by k at the ends too, where
  the kernel reaches beyond the earlier positions: what lies there counts as 0;
- kept indices are sorted; positions stay the original ones (keys are stored after RoPE);
- C follows from a byte budget instead of being fixed: with P prompt tokens, T expected answer
  tokens, all kept, and s free slots in the last page on average (half of it less one),
  C + T + s = B (P + T + s), hence C = round(B P - (1 - B) (T + s)), B being the knob's setting;
- a C too small for the window shrinks it to max(1, C // 4) (note "window"); a C below `min_tokens`
  is raised to it, which exceeds the budget (note "unreachable"). Both are counted;
- equal scores: the more recent token wins.
"""

from __future__ import annotations

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
from pask.methods.selection import by_kv_head, top


@dataclass(frozen=True)
class SnapKV(Method):
    """`window` w, `kernel` k (odd) and `pooling` ("max" or "avg") as above; `min_tokens` is the
    least number of prompt tokens kept however tight the budget."""

    budget: float = 0.33
    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    min_tokens: int = 8

    name: ClassVar[str] = "snapkv"
    label: ClassVar[str] = "SnapKV"
    paper: ClassVar[str] = "Li et al. 2024, arXiv 2404.14469"
    color: ClassVar[str] = "#0072b2"
    marker: ClassVar[str] = "s"
    knob: ClassVar[str] = "prompt tokens kept per layer and kv head"
    budgets: ClassVar[tuple[float, float]] = (0.05, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.min_tokens < 1:
            raise ValueError("snapkv: window and min_tokens must be at least 1")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"snapkv: kernel must be odd and positive, not {self.kernel}")
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"snapkv: pooling must be max or avg, not {self.pooling!r}")

    def capacity(self, info: PromptInfo) -> int:
        """Prompt tokens to keep so that B_persist meets the setting at the expected length; may be
        negative, where the answer alone takes more."""
        free_slots = (info.page_slots - 1) / 2
        kept_anyway = info.expected_new_tokens + free_slots
        return round(self.setting * info.prompt_tokens - (1 - self.setting) * kept_anyway)

    def open(self, info: PromptInfo) -> RequestState:
        return _SnapKVRequest(self, info)


class _SnapKVRequest(RequestState):
    def __init__(self, method: SnapKV, info: PromptInfo) -> None:
        wanted = method.capacity(info)
        self.method, self.info = method, info
        self.capacity = min(max(wanted, method.min_tokens), info.prompt_tokens)
        self.window = min(method.window, max(1, self.capacity // 4))
        keeps_all = self.capacity == info.prompt_tokens
        notes = []
        if wanted < self.capacity:
            notes.append(UNREACHABLE)
        if self.window < method.window and not keeps_all:
            notes.append("window")
        self.notes = tuple(notes)
        self.wants = Wants() if keeps_all else Wants(window_queries=self.window)

    def place(self, layer: int, captures: Captures) -> Placement:
        info, method = self.info, self.method
        if self.capacity == info.prompt_tokens:
            return Placement()
        assert captures.window_mass is not None  # it was asked for
        start = info.prompt_tokens - self.window
        earlier = by_kv_head(captures.window_mass, info)[:, :start]
        pool = F.max_pool1d if method.pooling == "max" else F.avg_pool1d
        pooled = pool(earlier, method.kernel, stride=1, padding=method.kernel // 2)
        best = top(pooled, self.capacity - self.window)
        window = torch.arange(start, info.prompt_tokens, device=best.device)
        return Placement.high(torch.cat([best, window.expand(info.kv_heads, -1)], dim=-1))
