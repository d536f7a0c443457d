"""The contract between the engine and a KV method.

A method is a frozen dataclass of parameters. For each request it opens a state object, which sees
the captures that the method asked for and answers, layer by layer, with the prompt tokens that
stay resident. The engine owns every tensor: it gathers what was kept, frees the rest, and counts
bytes from the tensors that then exist. Keep everything and Full KV's tokens come out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # listing methods must not cost a torch import
    import torch


@dataclass(frozen=True)
class Wants:
    """What a method asks the engine to capture during prefill (nothing, unless said here).

    `window_queries`: capture the attention mass that the last so many prompt queries put on every
    prompt key; 0 for none.
    """

    window_queries: int = 0


@dataclass(frozen=True)
class PromptInfo:
    """What is known about a request before its prefill; no tensor among it.

    `expected_new_tokens` is the workload's mean answer length (measured on the calibration split,
    given in the config): a method whose cache grows while decoding needs it to meet a budget.
    `page_slots` is the engine's page: resident slots are rounded up to it, and count so.
    """

    prompt_tokens: int
    layers: int
    kv_heads: int
    group_size: int  # query heads per kv head
    head_dim: int
    expected_new_tokens: int = 0
    page_slots: int = 1


@dataclass(frozen=True)
class Captures:
    """What one layer's prefill shows to a method: what its state's `wants` named.

    `window_mass`: [q_heads, prompt_tokens] fp32, softmax probabilities (causal) of the last
    `min(window_queries, prompt_tokens)` prompt queries, summed over those queries; None where the
    method did not ask for it.
    """

    window_mass: torch.Tensor | None = None


@dataclass(frozen=True)
class Keep:
    """A layer's answer: which prompt tokens stay resident in 16 bit.

    `tokens`: [kv_heads, kept] int64, sorted ascending and without repeats in each row; None keeps
    every token without a copy of the index.
    """

    tokens: torch.Tensor | None = None

    def check(self, info: PromptInfo) -> None:
        """Raise ValueError where the answer breaks the contract (a fault of the method)."""
        if self.tokens is None:
            return
        kept = self.tokens
        if (
            str(getattr(kept, "dtype", "")) != "torch.int64"
            or kept.ndim != 2
            or kept.shape[0] != info.kv_heads
        ):
            raise ValueError(f"Keep.tokens must be int64 [kv_heads={info.kv_heads}, kept]")
        if kept.shape[1] == 0:
            raise ValueError("a layer must keep at least one token")
        if int(kept.min()) < 0 or int(kept.max()) >= info.prompt_tokens:
            raise ValueError(f"kept index outside 0..{info.prompt_tokens - 1}")
        if kept.shape[1] > 1 and not bool((kept[:, 1:] > kept[:, :-1]).all()):
            raise ValueError("kept indices must ascend without repeats")


class RequestState(ABC):
    """One request under one method; holds all that the method remembers of it.

    `wants` may depend on the prompt's length, so it belongs to the state; it is read once, before
    prefill. `notes`, e.g. ("clamped",), are printed as counts beside the method's result.
    """

    wants: Wants = Wants()
    notes: tuple[str, ...] = ()

    @abstractmethod
    def keep(self, layer: int, captures: Captures) -> Keep:
        """Called once a layer, in ascending order, after that layer's exact prefill attention."""


@dataclass(frozen=True)
class Method(ABC):
    """Base of every method; a subclass adds its parameters as fields with defaults.

    `budget` is the target B_persist, resident bytes at the end of a request over Full KV's.
    """

    budget: float = 1.0

    name: ClassVar[str]
    label: ClassVar[str]  # as printed in tables
    paper: ClassVar[str]  # citation with arXiv id or venue
    color: ClassVar[str]  # one hex colour for every figure
    marker: ClassVar[str]  # one matplotlib marker
    knob: ClassVar[str]  # the one quantity that follows from `budget`
    budgets: ClassVar[tuple[float, float]]  # reachable range of `budget`, inclusive

    def __post_init__(self) -> None:
        low, high = self.budgets
        if not low <= self.budget <= high:
            raise ValueError(f"{self.name}: budget {self.budget} is outside {low}..{high}")

    @abstractmethod
    def open(self, info: PromptInfo) -> RequestState:
        """Begin one request: called when the prompt's length is known, before its prefill."""
