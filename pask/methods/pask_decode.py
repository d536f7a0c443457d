"""PASK's decode side alone: the prompt whole, each decoded token at its selected level.

What the paper's ablations are about (section 4.3: "with prefill disabled"). There is no budget, so
nothing is demoted or promoted while decoding; a policy's selection alone decides the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from pask.methods.contract import Captures, Decoded, Placement, PromptInfo, RequestState
from pask.methods.levels import Level
from pask.methods.pask import PASK
from pask.policy.policy import Policy
from pask.structure.buckets import bucket_name


@dataclass(frozen=True)
class PASKDecode(PASK):
    """The fields are those of `PASK`; `budget` and what concerns the prompt change no level."""

    budget: float = 0.95
    stages: str = "decode"

    name: ClassVar[str] = "pask_decode"
    label: ClassVar[str] = "PASK, decode only"
    color: ClassVar[str] = "#ee99aa"
    marker: ClassVar[str] = "d"
    knob: ClassVar[str] = "none"
    # Nominal: half the answer of a request whose prompt is ten times as long. The policy decides.
    budgets: ClassVar[tuple[float, float]] = (0.95, 0.95)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages != "decode":
            raise ValueError(f"pask_decode: stages has to be decode, not {self.stages!r}")

    def open(self, info: PromptInfo) -> RequestState:
        policy = self.policy_for(info)
        return _Request(self, policy, info)


class _Request(RequestState):
    acts_on_tokens = True

    def __init__(self, method: PASKDecode, policy: Policy, info: PromptInfo) -> None:
        self.recent = method.recent
        self.levels = frozenset(level for level in method.ladder.actions if level.is_low)
        self._lookup, self._coarsening = method.lookup(policy.decode.steps), policy.coarsening
        sizes = policy.decode.evidence.groups
        self._group_of = [group for group, size in enumerate(sizes) for _ in range(size)]

    def place(self, layer: int, captures: Captures) -> Placement:
        return Placement()

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        if decoded.tag is None:
            raise ValueError("pask_decode: it needs tags, and the request has no tag grammar")
        name = bucket_name(decoded.tag, self._coarsening)
        levels, _ = self._lookup.decide(name, inf, critical=False)
        return [levels[group] for group in self._group_of]
