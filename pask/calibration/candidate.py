"""A candidate Theta_i of one side as a method: every bucket at its level, the other side whole.

No budget and no lookup enters, so that what a development row shows is the table's alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import ClassVar

from pask.methods.contract import (
    Captures,
    Decoded,
    Method,
    Placement,
    PromptInfo,
    RequestState,
)
from pask.methods.levels import Level
from pask.policy.actions import token_cost
from pask.policy.evidence import SIDES
from pask.structure.buckets import DEFAULT_COARSENING, LayerBucket, bucket_name
from pask.structure.labels import Label

DECODE, PROMPT = SIDES

Levels = Mapping[str, tuple[Level, ...]]
"""By bucket name, the level in each layer group."""


def levels_by_name(table: Mapping[LayerBucket, Level], groups: int) -> Levels:
    """A table's levels name by name; a group that it lacks is at HIGH."""
    return {
        name: tuple(table.get(LayerBucket(name, group), Level.HIGH) for group in range(groups))
        for name in dict.fromkeys(bucket.name for bucket in table)
    }


@dataclass(frozen=True)
class Candidate(Method):
    """Tokens of `side` end where `table` (bucket and level) says, at HIGH where it says nothing.

    `groups`: layers in each group. `recent` latest decoded tokens stay at HIGH, and so do the first
    `sinks` prompt tokens and the last one. Only the side's own of these two matters.
    """

    side: str = DECODE
    table: tuple[tuple[LayerBucket, Level], ...] = ()
    groups: tuple[int, ...] = (1,)
    coarsening: str = DEFAULT_COARSENING
    recent: int = 4
    sinks: int = 4

    name: ClassVar[str] = "candidate"
    label: ClassVar[str] = "Candidate"
    paper: ClassVar[str] = "PASK, Equations 7 and 8"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "none"
    budgets: ClassVar[tuple[float, float]] = (1.0, 1.0)

    @cached_property
    def levels(self) -> Levels:
        return levels_by_name(dict(self.table), len(self.groups))

    @cached_property
    def by_layer(self) -> Mapping[str, tuple[Level, ...]]:
        """By bucket name, the level in each layer."""
        return {
            name: tuple(
                level for level, size in zip(levels, self.groups, strict=True) for _ in range(size)
            )
            for name, levels in self.levels.items()
        }

    @property
    def low_levels(self) -> frozenset[Level]:
        return frozenset(level for _, level in self.table if level.is_low)

    def tokens_at_high(self, names: Sequence[str]) -> float:
        """C_KV's sum over tokens of these bucket names: their cost in tokens at HIGH."""
        whole = (Level.HIGH,) * len(self.groups)
        return fsum(token_cost(self.levels.get(name, whole), self.groups) for name in names)

    def names(self, labels: Sequence[Label]) -> list[str]:
        """The bucket names of the prompt's tokens that may be below HIGH, in order."""
        return [label.value for label in labels[self.sinks : -1]]

    def open(self, info: PromptInfo) -> RequestState:
        if sum(self.groups) != info.layers:
            raise ValueError(f"candidate: groups of {sum(self.groups)} layers, not {info.layers}")
        if self.side == DECODE:
            return _Answer(self)
        return _Prompt(self, info)


class _Answer(RequestState):
    acts_on_tokens = True

    def __init__(self, method: Candidate) -> None:
        self.recent, self.levels = method.recent, method.low_levels
        self._by_layer, self._coarsening = method.by_layer, method.coarsening
        self._high = (Level.HIGH,) * sum(method.groups)

    def place(self, layer: int, captures: Captures) -> Placement:
        return Placement()

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        if decoded.tag is None:
            raise ValueError("a bucket is made of tags, and the request has no tag grammar")
        return self._by_layer.get(bucket_name(decoded.tag, self._coarsening), self._high)


class _Prompt(RequestState):
    def __init__(self, method: Candidate, info: PromptInfo) -> None:
        if info.labels is None:
            raise ValueError("a bucket is made of labels, and the request has none")
        self.levels = method.low_levels
        names = method.names(info.labels)
        per_group = [_placed(method, names, group, info) for group in range(len(method.groups))]
        self._placements = [
            placed
            for placed, size in zip(per_group, method.groups, strict=True)
            for _ in range(size)
        ]

    def place(self, layer: int, captures: Captures) -> Placement:
        return self._placements[layer]


def _placed(method: Candidate, names: Sequence[str], group: int, info: PromptInfo) -> Placement:
    """The prompt in one layer group, alike in every kv head."""
    import torch  # only where a prompt is placed: listing methods must not cost it

    levels = [Level.HIGH] * info.prompt_tokens
    for number, name in enumerate(names):
        if name in method.levels:
            levels[method.sinks + number] = method.levels[name][group]
    if all(level is Level.HIGH for level in levels):
        return Placement()
    at = torch.tensor(levels)
    return Placement(
        {
            level: (at == level).nonzero()[:, 0].expand(info.kv_heads, -1)
            for level in sorted(set(levels) - {Level.RELEASE})
        }
    )
