"""RocketKV: evict from the prompt once, then read only the most promising tokens at each step.

Source: Behnam et al. 2025, "RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV
Cache Compression", arXiv 2502.14051. Stage 1, at prefill end, per layer: attention probabilities
of the last w prompt queries, summed over them and over the query group, max-pooled along the
positions with a wide kernel; the top (C - w) earlier positions and the window stay. Stage 2, at
every decode step: each chunk of stored tokens has a summary (minimum and maximum of every key
channel), which bounds the logits of the query's r largest channels; the `topk` tokens of the best
chunks are attended to exactly. Stage 2 saves reading, not storage: its summaries are resident.

With a total compression c, the paper splits it as a = min(0.2 + 0.06 log2 c, 0.8): stage 1 stores
1 / c^a of the S = P + T tokens (P prompt, T expected answer), stage 2 has a factor q = c^(1 - a)
left, half of which is spent on the scan: topk = S / c / 2, r = head_dim chunk / q.

Deviations and open choices:
- the paper's budget is of what a step reads; here it is of what is resident. The setting B pays
  for the stored tokens, all decoded ones included, and for their summaries, 1 / chunk of a token
  each: with s free slots in a last page on average, twice (tokens and summaries), and (chunk - 1)
  / (2 chunk) for a last chunk that is not full, C + T = (B (P + T + s) - 2 s - (chunk - 1) /
  (2 chunk)) / (1 + 1 / chunk). The compression c of the rule above solves
  1 / c^a = B / (1 + 1 / chunk), up to c = 1024, where a reaches its bound;
- chunk = 3 is what the paper's rule (the square root of q, rounded up) gives for every B up to
  0.529; above, where it would give 2, it stays 3: a step to larger summaries would leave budgets
  that no setting meets, or take prompt tokens away as the budget grows. r is at most head_dim;
- inferred, and a field: `min_topk` = 64. At these budgets the rule leaves some 16 tokens of a
  short prompt, which no model answers from;
- `split="decoupled"` stores the same C and takes `topk` (0: all tokens are read, and there are no
  summaries to pay for) and `channels` (0: all) as they are, as serving engines do;
- kernel 63 and w = 32 as released, not the adaptive kernel of an early version; no layers are
  skipped; probabilities in fp32; mean instead of sum over the query group, which ranks alike;
- the released floor of 2 x max_new_tokens stored tokens is left out: with short prompts it would
  keep everything;
- inferred: a C too small for the window shrinks it to max(1, C // 4) (note "window");
- inferred: a C below `min_tokens` is raised to it, which exceeds the budget (note "unreachable");
- a request that would save no page by the expected end of its answer keeps everything, without
  summaries; below a setting of 1 it has the note "unreachable". Resident bytes grow with the
  setting as long as summaries are there. Dropping them, at the latest at 1, can save bytes where
  an answer gets longer than expected: decoded tokens have summaries too;
- equal scores: the more recent token wins, in both stages.
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
    SlotChoice,
    Wants,
)
from pask.methods.selection import by_kv_head, top

MOST_COMPRESSION_BITS = 10.0  # log2 of 1024, where 0.2 + 0.06 log2 c reaches 0.8


@dataclass(frozen=True)
class RocketKV(Method):
    """`window` w and `kernel` (odd) of stage 1; `chunk` tokens to a summary; `split`: "storage",
    where `min_topk` is the least that stage 2 reads, or "decoupled", where it reads `topk` tokens
    by `channels` channels; `min_tokens` is the least number of prompt tokens kept."""

    budget: float = 0.33
    window: int = 32
    kernel: int = 63
    chunk: int = 3
    split: str = "storage"
    min_topk: int = 64
    topk: int = 64
    channels: int = 0
    min_tokens: int = 8

    name: ClassVar[str] = "rocketkv"
    label: ClassVar[str] = "RocketKV"
    paper: ClassVar[str] = "Behnam et al. 2025, arXiv 2502.14051"
    color: ClassVar[str] = "#009e73"
    marker: ClassVar[str] = "D"
    knob: ClassVar[str] = "prompt tokens kept per layer and kv head, beside their summaries"
    budgets: ClassVar[tuple[float, float]] = (0.05, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = min(self.window, self.chunk, self.min_topk, self.min_tokens)
        if least < 1:
            raise ValueError("rocketkv: window, chunk, min_topk and min_tokens must be at least 1")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"rocketkv: kernel must be odd and positive, not {self.kernel}")
        if self.split not in ("storage", "decoupled"):
            raise ValueError(f"rocketkv: split must be storage or decoupled, not {self.split!r}")
        if self.topk < 0 or self.channels < 0:
            raise ValueError("rocketkv: topk and channels must not be negative")

    @property
    def summarises(self) -> bool:
        """Whether there is a second stage, whose summaries are stored."""
        return self.split == "storage" or self.topk > 0

    @property
    def compression(self) -> float:
        """The c of which stage 1 stores the share setting / (1 + 1 / chunk)."""
        share = self.setting / (1 + 1 / self.chunk)
        bits = -math.log2(share) if share > 0 else math.inf
        # (0.2 + 0.06 x) x = bits, x = log2 c
        x = (math.sqrt(0.04 + 0.24 * bits) - 0.2) / 0.12
        return 2 ** min(x, MOST_COMPRESSION_BITS)

    def capacity(self, info: PromptInfo) -> int:
        """Prompt tokens to keep so that B_persist meets the setting at the expected length; may be
        negative, where the answer alone takes more."""
        free_slots = (info.page_slots - 1) / 2
        slots = self.setting * (info.prompt_tokens + info.expected_new_tokens + free_slots)
        stored = slots - free_slots
        if self.summarises:
            stored -= free_slots + (self.chunk - 1) / (2 * self.chunk)
            stored /= 1 + 1 / self.chunk
        return round(stored - info.expected_new_tokens)

    def second_stage(self, info: PromptInfo) -> SlotChoice | None:
        """What a decode step reads; None where that is everything, without summaries."""
        if self.split == "decoupled":
            channels = min(self.channels or info.head_dim, info.head_dim)
            return SlotChoice(self.chunk, channels, self.topk) if self.topk else None
        c = self.compression
        left = c ** (0.8 - 0.06 * math.log2(c))  # c^(1 - a)
        channels = min(max(int(info.head_dim * self.chunk / left), 1), info.head_dim)
        total = info.prompt_tokens + info.expected_new_tokens
        return SlotChoice(self.chunk, channels, max(int(total / c) // 2, self.min_topk))

    def open(self, info: PromptInfo) -> RequestState:
        return _RocketKVRequest(self, info)


class _RocketKVRequest(RequestState):
    def __init__(self, method: RocketKV, info: PromptInfo) -> None:
        wanted = method.capacity(info)
        self.method, self.info = method, info
        self.capacity = min(max(wanted, method.min_tokens), info.prompt_tokens)
        if method.setting >= 1 or (method.summarises and self._saves_nothing()):
            self.capacity = info.prompt_tokens
        keeps_all = self.capacity == info.prompt_tokens
        self.window = min(method.window, max(1, self.capacity // 4))
        self.choice = None if keeps_all else method.second_stage(info)
        notes = []
        if method.setting < 1 and wanted < self.capacity:
            notes.append(UNREACHABLE)
        if self.window < method.window and not keeps_all:
            notes.append("window")
        self.notes = tuple(notes)
        self.wants = Wants() if keeps_all else Wants(window_queries=self.window)

    def _saves_nothing(self) -> bool:
        """Whether tokens and summaries take as many pages as all tokens would."""
        info = self.info
        stored = self.capacity + info.expected_new_tokens
        held = [stored, math.ceil(stored / self.method.chunk)]
        whole = info.prompt_tokens + info.expected_new_tokens
        return sum(math.ceil(slots / info.page_slots) for slots in held) >= math.ceil(
            whole / info.page_slots
        )

    def place(self, layer: int, captures: Captures) -> Placement:
        info = self.info
        if self.capacity == info.prompt_tokens:
            return Placement()
        assert captures.window_mass is not None  # it was asked for
        start = info.prompt_tokens - self.window
        earlier = by_kv_head(captures.window_mass, info)[:, :start]
        kernel = self.method.kernel
        pooled = F.max_pool1d(earlier, kernel, stride=1, padding=kernel // 2)
        best = top(pooled, self.capacity - self.window)
        window = torch.arange(start, info.prompt_tokens, device=best.device)
        return Placement.high(torch.cat([best, window.expand(info.kv_heads, -1)], dim=-1))
