"""Uniform quantisation: every token stays, all of them at 8, 4 or 2 bit.

Source of the 2-bit form by channel: Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache", arXiv 2402.02750. The plain form has no paper of its own: asymmetric
round to nearest per token and group of 32 channels, with an fp16 scale and zero each, much as
FlexGen (Sheng et al. 2023, arXiv 2303.06865) does at 4 bit. Prompt tokens go to their level after
each layer's exact prefill attention, decoded ones at once (their own query sees what is left of
them), or when `recent` later ones have been fed.

`keys` says how keys are quantised; values are always per token:
- "plain": per token, like values;
- "statistics": the same after each channel was centred and scaled by the mean and the deviation of
  the request's own prompt (two fp16 vectors a layer and kv head, which count). Channels with large
  offsets would otherwise take a group's whole range;
- "channel" (2 bit alone): KIVI's keys, a scale and a zero per channel among 32 tokens. Only whole
  groups of 32 prompt tokens are quantised; the rest of the prompt, its residual, stays in 16 bit.

Defaults: "statistics" at 8 and 4 bit, "channel" at 2 bit. The other forms are variants.

Deviations and open choices:
- there is no knob: `budgets` is what codes, scales and zeros take of 16 bit, (bits + 1) / 16. Pages
  rounded up, the statistics and `recent` tokens lie above it. With "channel" a request takes more
  still, since the residual and, by default, all that is decoded stay in 16 bit;
- "statistics" is no published method, but the better form of keys that are quantised per token;
- KIVI quantises decoded tokens too, as its residual of 128 tokens fills up. Here they stay in 16
  bit (`decode="residual"`), in answers longer than that too, or go to 4 bit one by one, per token
  with plain keys (`decode="int4"`, not KIVI's);
- of a prompt KIVI leaves in 16 bit the keys beyond the last whole 128 tokens and the values of the
  last 128; here it is the keys and values beyond the last group of 32, so that a short prompt is
  quantised at all. One of fewer than 32 tokens is not (note "residual");
- no tokens at the start are kept in 16 bit, and all layers are treated alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from pask.methods.contract import (
    Captures,
    Decoded,
    Method,
    Placement,
    PromptInfo,
    RequestState,
)
from pask.methods.levels import CHANNEL_GROUP, Level


@dataclass(frozen=True)
class _Uniform(Method):
    """`recent` decoded tokens beside the newest wait in 16 bit, -1: not even that one; `keys` is
    "plain" or "statistics"."""

    recent: int = -1
    keys: str = "statistics"

    knob: ClassVar[str] = "none"
    key_forms: ClassVar[tuple[str, ...]] = ("plain", "statistics")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < -1:
            raise ValueError(f"{self.name}: recent must be at least -1")
        if self.keys not in self.key_forms:
            known = ", ".join(self.key_forms)
            raise ValueError(f"{self.name}: keys must be one of {known}, not {self.keys!r}")

    @property
    @abstractmethod
    def level(self) -> Level:
        """Where all tokens end."""

    def open(self, info: PromptInfo) -> RequestState:
        return _PerToken(self, info)


@dataclass(frozen=True)
class UniformInt8(_Uniform):
    """INT8, 9 effective bits; fields as above."""

    budget: float = 0.5625

    name: ClassVar[str] = "uniform_int8"
    label: ClassVar[str] = "Uniform INT8"
    paper: ClassVar[str] = "round to nearest per token, groups of 32 channels"
    color: ClassVar[str] = "#999933"
    marker: ClassVar[str] = "h"
    budgets: ClassVar[tuple[float, float]] = (0.5625, 0.5625)

    @property
    def level(self) -> Level:
        return Level.LOW8


@dataclass(frozen=True)
class UniformInt4(_Uniform):
    """INT4, 5 effective bits; fields as above."""

    budget: float = 0.3125

    name: ClassVar[str] = "uniform_int4"
    label: ClassVar[str] = "Uniform INT4"
    paper: ClassVar[str] = "round to nearest per token, groups of 32 channels"
    color: ClassVar[str] = "#117733"
    marker: ClassVar[str] = "H"
    budgets: ClassVar[tuple[float, float]] = (0.3125, 0.3125)

    @property
    def level(self) -> Level:
        return Level.LOW4


@dataclass(frozen=True)
class UniformInt2(_Uniform):
    """INT2, 3 effective bits; `keys` may be "channel" too, with `decode` "residual" or "int4"."""

    budget: float = 0.1875
    keys: str = "channel"
    decode: str = "residual"

    name: ClassVar[str] = "uniform_int2"
    label: ClassVar[str] = "Uniform INT2"
    paper: ClassVar[str] = "per token, or KIVI: Liu et al. 2024, arXiv 2402.02750"
    color: ClassVar[str] = "#44aa99"
    marker: ClassVar[str] = "8"
    budgets: ClassVar[tuple[float, float]] = (0.1875, 0.1875)
    key_forms: ClassVar[tuple[str, ...]] = ("plain", "statistics", "channel")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decode not in ("residual", "int4"):
            raise ValueError(f"{self.name}: decode must be residual or int4, not {self.decode!r}")
        if self.recent >= 0 and self.keys == "channel" and self.decode == "residual":
            raise ValueError(f"{self.name}: recent says nothing where decoded tokens stay")

    @property
    def level(self) -> Level:
        return Level.LOW2

    def open(self, info: PromptInfo) -> RequestState:
        return _ByChannel(self, info) if self.keys == "channel" else _PerToken(self, info)


class _PerToken(RequestState):
    acts_on_tokens = True

    def __init__(self, method: _Uniform, info: PromptInfo) -> None:
        self.info, self.recent = info, method.recent
        self.levels = frozenset({method.level})
        self.shifted_keys = method.keys == "statistics"
        self._of_decoded = (method.level,) * info.layers
        tokens = torch.arange(info.prompt_tokens).expand(info.kv_heads, -1)
        self._placement = Placement({method.level: tokens})

    def place(self, layer: int, captures: Captures) -> Placement:
        return self._placement

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        return self._of_decoded


class _ByChannel(RequestState):
    shifted_keys = False
    channel_keys = True

    def __init__(self, method: UniformInt2, info: PromptInfo) -> None:
        self.recent = method.recent
        self.acts_on_tokens = method.decode == "int4"
        self.levels = frozenset({Level.LOW2} | ({Level.LOW4} if self.acts_on_tokens else set()))
        self._of_decoded = (Level.LOW4,) * info.layers
        tokens = torch.arange(info.prompt_tokens).expand(info.kv_heads, -1)
        grouped = info.prompt_tokens // CHANNEL_GROUP * CHANNEL_GROUP
        self._placement = Placement(
            {Level.LOW2: tokens[:, :grouped], Level.HIGH: tokens[:, grouped:]}
        )
        self.notes = () if grouped else ("residual",)

    def place(self, layer: int, captures: Captures) -> Placement:
        return self._placement

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        return self._of_decoded
