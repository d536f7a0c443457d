"""Toy policies that act on tokens alone: random levels, by token and layer, in all combinations."""

from __future__ import annotations

import random
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
from pask.methods.levels import Level


@dataclass(frozen=True)
class ByToken(Method):
    """Each decoded token's level in a layer is drawn by (seed, token, layer) from `levels`.

    `layers`: the layers that are touched. `prompt`: the levels of the prompt's tokens, drawn in
    the same way; () keeps it whole.
    """

    seed: int = 0
    levels: tuple[Level, ...] = (Level.RELEASE, Level.LOW4, Level.HIGH)
    layers: tuple[int, ...] = (0, 1)
    recent: int = 0
    prompt: tuple[Level, ...] = ()
    shifted_keys: bool = True

    name: ClassVar[str] = "by_token"
    label: ClassVar[str] = "By token"
    paper: ClassVar[str] = "a toy"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "none"
    budgets: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def open(self, info: PromptInfo) -> RequestState:
        return _ByTokenState(self, info)


class _ByTokenState(RequestState):
    acts_on_tokens = True
    notes = ("toy",)

    def __init__(self, method: ByToken, info: PromptInfo) -> None:
        self.method, self.info = method, info
        used = {*method.levels, *method.prompt}
        self.levels = frozenset(level for level in used if level.is_low)
        self.recent, self.shifted_keys = method.recent, method.shifted_keys
        self.seen = self.placed = 0

    def place(self, layer: int, captures: Captures) -> Placement:
        assert layer == self.placed
        self.placed += 1
        method, info = self.method, self.info
        if not method.prompt or layer not in method.layers:
            return Placement()
        draw = random.Random(f"{method.seed} {layer}")
        drawn = [draw.choice(method.prompt) for _ in range(info.prompt_tokens)]
        drawn[-1] = Level.HIGH
        return Placement(
            {
                level: torch.tensor([n for n, found in enumerate(drawn) if found == level])
                .to(torch.int64)
                .expand(info.kv_heads, -1)
                for level in set(drawn) - {Level.RELEASE}
            }
        )

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        assert self.placed == self.info.layers
        assert decoded.index == self.seen
        self.seen += 1
        return [
            random.Random(f"{self.method.seed} {decoded.token_id} {layer}").choice(
                self.method.levels
            )
            if layer in self.method.layers
            else Level.HIGH
            for layer in range(self.info.layers)
        ]
