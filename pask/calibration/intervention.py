"""One bucket at another level, all else at HIGH: the intervention a(q) of Equations 4 and 5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from pask.structure.buckets import DEFAULT_COARSENING, LayerBucket, bucket_name, layer_groups

_NONE = LayerBucket("", 0)  # a dataclass field of a subclass needs a default; no tag has this name


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
