"""One bucket at another level, all else at HIGH: the intervention a(q) of Equations 4 and 5.

A decoded token's bucket is its coarsened tag, a prompt token's is its label; either way in one
group of layers. Both kinds act on tokens, tags and labels alone, so known answers can be judged
under them by replay (`pask.engine.replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pask.methods.contract import (
    Captures,
    Decoded,
    Method,
    Placement,
    PromptInfo,
    RequestState,
)
from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.structure.buckets import DEFAULT_COARSENING, LayerBucket, bucket_name, layer_groups

if TYPE_CHECKING:
    from pask.structure.labels import Label

SINKS = 4
"""First prompt tokens that stay at HIGH unless said otherwise: attention rests on them whatever
they say (Xiao et al., arXiv 2309.17453), so losing them would tell nothing of their label."""

_NONE = LayerBucket("", 0)  # a dataclass field of a subclass needs a default; nothing has this name


@dataclass(frozen=True)
class Buckets:
    """What a bucket is: layer groups, and names of coarsened tags (`pask.structure.buckets`)."""

    layer_groups: int | tuple[int, ...]
    coarsening: str


@dataclass(frozen=True)
class Interventions:
    """Which changes are tried on each bucket: every level of `ladder` below HIGH.

    `recent` latest decoded tokens beside the newest, the first `sinks` prompt tokens and the last
    one stay at HIGH in all of them.
    """

    recent: int
    ladder: Ladder
    sinks: int = SINKS

    @property
    def levels(self) -> tuple[Level, ...]:
        """Those below HIGH, ascending."""
        return tuple(level for level in self.ladder.actions if level is not Level.HIGH)


@dataclass(frozen=True)
class OneBucket(Method):
    """Decoded tokens of `bucket` end at `level` in the bucket's layer group.

    `groups` and `coarsening` say what the bucket's group and name mean; `recent` latest decoded
    tokens stay at HIGH whatever their bucket. The prompt stays whole.
    """

    bucket: LayerBucket = _NONE
    level: Level = Level.RELEASE
    recent: int = 8
    groups: int | tuple[int, ...] = 3
    coarsening: str = DEFAULT_COARSENING

    name: ClassVar[str] = "one_bucket"
    label: ClassVar[str] = "One bucket"
    paper: ClassVar[str] = "PASK, Equations 4 and 5"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "none"
    budgets: ClassVar[tuple[float, float]] = (1.0, 1.0)

    def open(self, info: PromptInfo) -> RequestState:
        return _OneBucketRequest(self, info)


class _OneBucketRequest(RequestState):
    acts_on_tokens = True

    def __init__(self, method: OneBucket, info: PromptInfo) -> None:
        self.recent = method.recent
        self.levels = frozenset({method.level} if method.level.is_low else ())
        self._bucket, self._coarsening = method.bucket.name, method.coarsening
        self._high = [Level.HIGH] * info.layers
        touched = layer_groups(info.layers, method.groups)[method.bucket.group]
        self._other = [
            method.level if layer in touched else Level.HIGH for layer in range(info.layers)
        ]

    def place(self, layer: int, captures: Captures) -> Placement:
        return Placement()

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        if decoded.tag is None:
            raise ValueError("a bucket is made of tags, and the request has no tag grammar")
        mine = bucket_name(decoded.tag, self._coarsening) == self._bucket
        return self._other if mine else self._high


@dataclass(frozen=True)
class OneLabel(Method):
    """Prompt tokens whose label is `bucket`'s name are at `level` in the bucket's layer group.

    The first `sinks` prompt tokens and the last one stay at HIGH whatever their label, so no layer
    ends up empty. `groups` says what the bucket's group means. The prefill is exact, so the first
    token is chosen as ever. Decoded tokens stay at HIGH.
    """

    bucket: LayerBucket = _NONE
    level: Level = Level.RELEASE
    sinks: int = SINKS
    groups: int | tuple[int, ...] = 3

    name: ClassVar[str] = "one_label"
    label: ClassVar[str] = "One label"
    paper: ClassVar[str] = "PASK, Equations 4 and 5"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "none"
    budgets: ClassVar[tuple[float, float]] = (1.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0:
            raise ValueError(f"one_label: {self.sinks} sinks, at least 0 tokens stay")

    def open(self, info: PromptInfo) -> RequestState:
        return _OneLabelRequest(self, info)


def changeable(labels: Sequence[Label], sinks: int) -> range:
    """The prompt's tokens that may be changed: all but the first `sinks` and the last one."""
    return range(sinks, max(len(labels) - 1, sinks))


class _OneLabelRequest(RequestState):
    def __init__(self, method: OneLabel, info: PromptInfo) -> None:
        if info.labels is None:
            raise ValueError("a bucket is made of labels, and the request has none")
        self.levels = frozenset({method.level} if method.level.is_low else ())
        self._touched = layer_groups(info.layers, method.groups)[method.bucket.group]
        self._placement = Placement()
        touchable = changeable(info.labels, method.sinks)
        chosen = [n for n in touchable if info.labels[n].value == method.bucket.name]
        if chosen and method.level is not Level.HIGH:
            self._placement = _placed(chosen, method.level, info)

    def place(self, layer: int, captures: Captures) -> Placement:
        return self._placement if layer in self._touched else Placement()


def _placed(chosen: Sequence[int], level: Level, info: PromptInfo) -> Placement:
    """`chosen` tokens at `level`, the others at HIGH, alike in every kv head."""
    import torch  # only where a prompt is placed: listing methods must not cost it

    taken = set(chosen)
    high = [n for n in range(info.prompt_tokens) if n not in taken]
    kept = {Level.HIGH: high} | ({level: list(chosen)} if level.is_low else {})
    return Placement(
        {
            at: torch.tensor(tokens, dtype=torch.int64).expand(info.kv_heads, -1)
            for at, tokens in kept.items()
        }
    )
