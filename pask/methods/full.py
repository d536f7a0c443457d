"""Full KV: every token stays, the reference that all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pask.methods.contract import Captures, Method, Placement, PromptInfo, RequestState


class _KeepAll(RequestState):
    def place(self, layer: int, captures: Captures) -> Placement:
        return Placement()


@dataclass(frozen=True)
class FullKV(Method):
    """Keeps the whole prompt and everything decoded; B_persist is 1 by definition."""

    name: ClassVar[str] = "full"
    label: ClassVar[str] = "Full KV"
    paper: ClassVar[str] = "uncompressed reference"
    color: ClassVar[str] = "#7f7f7f"
    marker: ClassVar[str] = "o"
    knob: ClassVar[str] = "none"
    budgets: ClassVar[tuple[float, float]] = (1.0, 1.0)

    def open(self, info: PromptInfo) -> RequestState:
        return _KeepAll()
