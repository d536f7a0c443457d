"""The contract between the engine and a KV method.

A method is a frozen dataclass of parameters. For each request it opens a state object, which sees
the captures that the method asked for and answers with a plan: layer by layer which prompt tokens
stay at which level, and, while decoding, the final level of each token or the tokens to evict. The
engine owns every tensor: it moves, quantises and frees what the plan says, and counts bytes from
the tensors that then exist. Keep everything and Full KV's tokens come out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pask.methods.levels import Level

if TYPE_CHECKING:  # listing methods must not cost a torch import
    import torch

    from pask.structure.labels import Label
    from pask.structure.tags import Tag


UNREACHABLE = "unreachable"
"""The note of a request that takes more bytes than the knob's value asks for, because the method
cannot go lower there (a prompt shorter than its window, say); the tables count it."""


@dataclass(frozen=True)
class Wants:
    """What a method asks the engine to capture (nothing, unless said here).

    `window_queries`: the attention mass that the last so many prompt queries put on every prompt
    key; 0 for none. `prompt_mass`: the same of all prompt queries. `step_mass`: at every decode
    step the mass that the new token's query puts on every resident token.
    """

    window_queries: int = 0
    prompt_mass: bool = False
    step_mass: bool = False


@dataclass(frozen=True)
class PromptInfo:
    """What is known about a request before its prefill; no tensor among it.

    `expected_new_tokens` is the workload's mean answer length (measured on the calibration split,
    given in the config): a method whose cache grows while decoding needs it to meet a budget.
    `page_slots` is the engine's page: resident slots are rounded up to it, and count so.
    `labels` is what each prompt token is for, or None where the request was not labelled; `texts`
    are the bytes that it stands for.
    """

    prompt_tokens: int
    layers: int
    kv_heads: int
    group_size: int  # query heads per kv head
    head_dim: int
    expected_new_tokens: int = 0
    page_slots: int = 1
    labels: Sequence[Label] | None = None
    texts: Sequence[bytes] | None = None


@dataclass(frozen=True)
class Captures:
    """What one layer's prefill shows to a method: what its state's `wants` named.

    `window_mass`, `prompt_mass`: [q_heads, prompt_tokens] fp32, softmax probabilities (causal) of
    the last `min(window_queries, prompt_tokens)` prompt queries, and of all of them, summed over
    those queries; None where the method did not ask for it.
    """

    window_mass: torch.Tensor | None = None
    prompt_mass: torch.Tensor | None = None


@dataclass(frozen=True)
class Placement:
    """A layer's answer: which prompt tokens stay, and at which level.

    `tokens`: by level, [kv_heads, n] int64, ascending and without repeats in each row, no token at
    two levels of one kv head; what is named nowhere is released. None keeps every token at HIGH
    without a copy of the index.
    """

    tokens: Mapping[Level, torch.Tensor] | None = None

    @classmethod
    def high(cls, tokens: torch.Tensor) -> Placement:
        """Keep `tokens` [kv_heads, n] in 16 bit and release the others."""
        return cls({Level.HIGH: tokens})

    def check(self, info: PromptInfo, levels: frozenset[Level]) -> None:
        """Raise ValueError where the answer breaks the contract (a fault of the method).

        `levels` are those that the state has declared; HIGH needs no declaration.
        """
        if self.tokens is None:
            return
        for level, kept in self.tokens.items():
            if not isinstance(level, Level) or level not in levels | {Level.HIGH}:
                raise ValueError(f"tokens at {level!r}, which is not among the state's levels")
            _check_rows(kept, info, level)
        self._check_together(info)

    def _check_together(self, info: PromptInfo) -> None:
        assert self.tokens is not None
        held = [kept for kept in self.tokens.values() if kept.shape[1]]
        if not held:
            raise ValueError("a layer must keep at least one token")
        if len(held) > 1:
            import torch

            together = torch.cat(held, dim=1).sort(dim=1).values
            if bool((together[:, 1:] == together[:, :-1]).any()):
                raise ValueError("a token is at two levels")


def _check_rows(kept: torch.Tensor, info: PromptInfo, level: Level) -> None:
    if (
        str(getattr(kept, "dtype", "")) != "torch.int64"
        or kept.ndim != 2
        or kept.shape[0] != info.kv_heads
    ):
        raise ValueError(f"{level.name} tokens must be int64 [kv_heads={info.kv_heads}, n]")
    if not kept.shape[1]:
        return
    if int(kept.min()) < 0 or int(kept.max()) >= info.prompt_tokens:
        raise ValueError(f"token outside 0..{info.prompt_tokens - 1}")
    if kept.shape[1] > 1 and not bool((kept[:, 1:] > kept[:, :-1]).all()):
        raise ValueError("tokens must ascend without repeats")


@dataclass(frozen=True)
class Decoded:
    """A decoded token, as a method sees it when it is accepted; the first has `index` 0."""

    index: int
    token_id: int
    text: bytes
    tag: Tag | None  # None where the request has no tag grammar


@dataclass(frozen=True)
class SlotChoice:
    """While decoding, attention reads only the `count` most promising of the resident tokens.

    They are found by summaries of `chunk` tokens each, which are resident too and count, ranked by
    the `channels` channels of the query that weigh most (`kernels.choose_slots`; RocketKV, its
    second stage). `channels` is at most head_dim.
    """

    chunk: int
    channels: int
    count: int

    def __post_init__(self) -> None:
        if min(self.chunk, self.channels, self.count) < 1:
            raise ValueError("chunk, channels and count must be at least 1")


class RequestState(ABC):
    """One request under one method; holds all that the method remembers of it.

    What it declares may depend on the prompt's length, so it belongs to the state; it is read
    once, before prefill, and stays as it is:

    - `wants`: the captures it needs;
    - `notes`, e.g. ("clamped",), are printed as counts beside the method's result;
    - `levels`: the low levels that its answers may use;
    - `recent`: beside the newest decoded token so many before it stay at HIGH whatever their final
      level; -1: not even the newest, which attends to itself at its final level;
    - `shifted_keys`: low keys are stored centred and scaled per channel by the prompt's own
      statistics (two vectors a layer and kv head, which count), not plain;
    - `channel_keys`: keys at LOW2 share a scale and a zero per channel among 32 tokens, in the
      order of their positions (KIVI), instead of per token among 32 channels. Such tokens come
      from the prompt, a multiple of 32 in each layer; `level_of` may not answer LOW2 then;
    - `acts_on_tokens`: `level_of` says where decoded tokens end (else all of them stay at HIGH);
    - `choice`: attention reads a part of what is resident, all of it at HIGH;
    - `evicts`: `evict` is asked after every decode step; such a request is fed one token a step.
    """

    wants: Wants = Wants()
    notes: tuple[str, ...] = ()
    levels: frozenset[Level] = frozenset()
    recent: int = 0
    shifted_keys: bool = True
    channel_keys: bool = False
    acts_on_tokens: bool = False
    choice: SlotChoice | None = None
    evicts: bool = False

    @abstractmethod
    def place(self, layer: int, captures: Captures) -> Placement:
        """Called once a layer, in ascending order, after that layer's exact prefill attention."""

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        """The final level of a token in each layer; called in order, as tokens are accepted.

        It takes effect when `recent` more tokens have been fed. Only tokens, tags and what the
        state remembers of them may enter: then an answer can be judged by replay.
        """
        raise NotImplementedError("a state that acts on tokens has to define level_of")

    def accepted(self, decoded: Decoded) -> None:
        """Told of each decoded token where the state evicts, in order, when it is accepted: before
        it is fed."""
        return

    def evict(self, tokens: int, mass: torch.Tensor | None) -> torch.Tensor | None:
        """After a decode step: which of the `tokens` so far (prompt and decoded) to drop now.

        `mass` [layers, kv_heads, tokens] fp32, where `wants.step_mass`: the step's softmax
        probabilities, summed over the query group, by token, the new one last; 0 where a token is
        not resident. Answers [layers, kv_heads, n] int64, resident tokens all, or None for none.
        """
        raise NotImplementedError("a state that evicts has to define evict")


@dataclass(frozen=True)
class Method(ABC):
    """Base of every method; a subclass adds its parameters as fields with defaults.

    `budget` is the target B_persist, resident bytes at the end of a request over Full KV's.
    `nominal` is the value of the method's one knob, within `knob_range`, that was found to meet the
    budget on development rows; None: not searched, `setting` is the budget itself. Resident bytes
    grow with the knob. A method whose bytes nothing can change has no knob: the two `budgets` are
    equal, what its stored numbers take without rounding up to pages.
    """

    budget: float = 1.0
    nominal: float | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    label: ClassVar[str]  # as printed in tables
    paper: ClassVar[str]  # citation with arXiv id or venue
    color: ClassVar[str]  # one hex colour for every figure
    marker: ClassVar[str]  # one matplotlib marker
    knob: ClassVar[str]  # what the knob is, in words; "none" where there is none
    budgets: ClassVar[tuple[float, float]]  # reachable range of `budget`, inclusive
    knob_range: ClassVar[tuple[float, float]] = (0.0, 1.0)  # of `nominal`, inclusive
    calibrated: ClassVar[bool] = False  # some fields are measured first: see `calibrate`

    def __post_init__(self) -> None:
        low, high = self.budgets
        if not low <= self.budget <= high:
            raise ValueError(f"{self.name}: budget {self.budget} is outside {low}..{high}")
        low, high = self.knob_range
        if self.nominal is not None and not low <= self.nominal <= high:
            raise ValueError(f"{self.name}: nominal {self.nominal} is outside {low}..{high}")

    @property
    def has_knob(self) -> bool:
        return self.budgets[0] < self.budgets[1]

    @property
    def setting(self) -> float:
        """The knob's value: `nominal`, or the budget where that was not searched."""
        return self.budget if self.nominal is None else self.nominal

    @abstractmethod
    def open(self, info: PromptInfo) -> RequestState:
        """Begin one request: called when the prompt's length is known, before its prefill."""

    def calibrate(self, prompts: Iterable[PromptEvidence]) -> Mapping[str, Any]:
        """The values of the fields that are measured on the calibration split's prompts.

        Asked once per model and set of parameters, whatever the budget, of methods that declare
        `calibrated`; numbers,
        texts and tuples of such. `open` may count on these fields being set.
        """
        raise NotImplementedError("a method that is calibrated has to define calibrate")


class PromptEvidence(Protocol):
    """A calibration prompt, of which a method may ask what storing tokens lower would do."""

    @property
    def info(self) -> PromptInfo: ...

    def distortion(
        self,
        tokens: torch.Tensor,
        level: Level,
        *,
        shifted_keys: bool = False,
        channel_keys: bool = False,
    ) -> float:
        """How much attention's output changes when `tokens` alone are at `level`.

        tokens: [n] int64, ascending. The squared L2 distance between the outputs with and without
        the change, summed over the prompt's queries, the maximum over query heads, summed over the
        probed layers. With `channel_keys` (LOW2 only) tokens beyond the last multiple of 32
        share ranges among themselves. 0 for no tokens.
        """
