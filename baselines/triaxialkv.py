"""TriAxialKV: bits by what a token is for, chosen once per model by how much it matters.

Source: Shen et al. 2026, "TriAxialKV", arXiv 2605.17170. Every prompt token has a tag, temporal |
modality | semantic, from the chat template alone. On calibration prompts D_k(b) is measured for
every tag k: the squared error of attention's output when the tag's tokens alone are stored at b
bits (maximum over heads, sum over a few layers, mean over prompts). The tags' bits b_k in {2, 4}
then minimise sum_k D_k(b_k) subject to sum_k N_k b_k <= Bbits sum_k N_k, with N_k the tag's median
token count: exactly for up to 22 tags, beyond by (D_k(2) - D_k(4)) / (2 N_k). The map is static.
INT4: asymmetric, groups of 32 channels of a token. INT2: values likewise, keys per channel among 32
tokens in the order of their positions; fewer than 32 that are left are stored at INT4. Decoded
tokens are INT4 at once; nothing is evicted.

`triaxialkv_rlh` gives the same tags and the same measurement other actions: release, INT4 with
keys freed of the prompt's channel statistics, 16 bit; at costs 0, 5/16 and 1. It is not the
paper's: it tells apart what tags are worth and what the bits are worth, at any budget.

Deviations and open choices, both methods:
- tags follow from prompt labels. Temporal: `older` up to the first token of the row's own messages,
  `current` from it on (a row is one turn; a system message of its own counts as its beginning).
  There is text alone, so modality is left out. Semantic: `user`; `delim` for the chat template's
  own text; `inst` for all else (instructions, tool documents, worked examples, also where these are
  earlier turns). `assistant`, `reasoning`, `tool_call` and `obs` do not occur in such prompts;
- keys are quantised after RoPE, as stored [inf];
- the layers probed are four, the middles of equal stretches; the sum is over a prompt's queries;
  the replaced keys and values are read by every query [inf];
- N_k is the median over all calibration prompts, at least 1 [inf: the paper says so of shared
  system text]; a tag that calibration did not see comes first for more bits;
- `split_marginal` (not the paper's): bits go up token by token, tag after tag in the order that
  the measurement gives, the most recent tokens of a tag first, until a request's own share is
  spent. With whole tags bytes would move in steps, and could not be matched. False: whole tags.

triaxialkv:
- the tags that the paper's map puts at INT4 come first in that order, then the others by gain per
  bit; both by gain per bit among themselves, and by name where equal;
- `remainder`s are the most recent INT2 tokens. A prompt of P tokens holds at least P mod 32 of them
  at INT4; where the knob asks for fewer the note is "unreachable";
- the knob is Bbits, of the prompt's tokens; the payload, 1 bit of scales and zeros included, is
  (Bbits + 1) / 16 of Full KV's. Rounding up to pages comes on top;
- sensitivity to INT2 is measured with each tag's keys grouped among themselves.

triaxialkv_rlh:
- the order is that of D saved per byte, over each tag's lower convex hull; the longest prefix of it
  whose bytes are within the budget is taken. Bytes are whole pages at the expected answer length T,
  in 16-bit slots per layer and kv head, r rounding up to pages, for h prompt tokens in 16 bit and l
  at INT4: r(h + T) + 5/16 r(l) + (1 for the statistics, if l > 0) <= B r(P + T);
- decoded tokens stay in 16 bit: prompts do not tell how much they matter. `decode_level` "low4"
  stores them at INT4 at once, and T moves to l;
- one prompt token stays whatever the budget: where all that is left is more than it allows, the
  prefix that holds least is taken; note "unreachable".
"""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from pask.methods.bit_solver import (
    LOW4_COST,
    best_subset,
    by_rate,
    convex_steps,
    full_slots,
    held_slots,
)
from pask.methods.contract import (
    UNREACHABLE,
    Captures,
    Decoded,
    Method,
    Placement,
    PromptEvidence,
    PromptInfo,
    RequestState,
)
from pask.methods.levels import CHANNEL_GROUP, Level
from pask.structure.labels import Label

_SEMANTIC = {Label.USER: "user", Label.CHAT_SCAFFOLD: "delim"}  # all else: inst


def prompt_tags(labels: Sequence[Label]) -> tuple[str, ...]:
    """temporal|semantic of each prompt token, e.g. `older|inst`."""
    first = labels.index(Label.USER) if Label.USER in labels else len(labels)
    return tuple(
        f"{'older' if at < first else 'current'}|{_SEMANTIC.get(label, 'inst')}"
        for at, label in enumerate(labels)
    )


def tokens_by_tag(info: PromptInfo, who: str) -> dict[str, torch.Tensor]:
    """Positions [n] int64, ascending, of each tag in the prompt; ValueError without labels."""
    if info.labels is None:
        raise ValueError(f"{who}: tags need a prompt's labels, and the request has none")
    found: dict[str, list[int]] = {}
    for at, tag in enumerate(prompt_tags(info.labels)):
        found.setdefault(tag, []).append(at)
    return {tag: torch.tensor(positions) for tag, positions in sorted(found.items())}


@dataclass(frozen=True)
class _Triaxial(Method):
    """`sensitivity` is measured: (tag, D at the lowest level, D at INT4, N) of each tag.

    The lowest level is INT2, or release for `triaxialkv_rlh`.
    """

    sensitivity: tuple[tuple[str, float, float, int], ...] = ()
    split_marginal: bool = True

    calibrated: ClassVar[bool] = True
    lowest: ClassVar[Level]
    shifted_keys: ClassVar[bool]
    channel_keys: ClassVar[bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        for row in self.sensitivity:
            tag, lowest, low4, count = row
            if not (math.isfinite(lowest) and math.isfinite(low4) and lowest >= 0 and low4 >= 0):
                raise ValueError(f"{self.name}: sensitivity of {tag} is not finite and positive")
            if count < 1:
                raise ValueError(f"{self.name}: {count} tokens of {tag}")
        tags = [row[0] for row in self.sensitivity]
        if len(set(tags)) < len(tags):
            raise ValueError(f"{self.name}: a tag is listed twice")

    def open(self, info: PromptInfo) -> RequestState:
        if not self.sensitivity:
            raise ValueError(f"{self.name}: not calibrated: run pask calibrate")
        return self._opened(info)

    def calibrate(self, prompts: Iterable[PromptEvidence]) -> Mapping[str, Any]:
        """`sensitivity`; ValueError without prompts, or for one without labels."""
        measured: dict[str, list[tuple[float, float, int]]] = {}
        number = 0
        for prompt in prompts:
            number += 1
            for tag, tokens in tokens_by_tag(prompt.info, self.name).items():
                lowest = prompt.distortion(
                    tokens,
                    self.lowest,
                    shifted_keys=self.shifted_keys and self.lowest.is_low,
                    channel_keys=self.channel_keys,
                )
                low4 = prompt.distortion(tokens, Level.LOW4, shifted_keys=self.shifted_keys)
                measured.setdefault(tag, []).append((lowest, low4, len(tokens)))
        if not number:
            raise ValueError(f"{self.name}: no calibration prompts")
        rows = []
        for tag, found in sorted(measured.items()):
            lowest, low4 = (math.fsum(one[part] for one in found) / number for part in (0, 1))
            counts = [one[2] for one in found] + [0] * (number - len(found))
            rows.append((tag, lowest, low4, max(1, round(statistics.median(counts)))))
        return {"sensitivity": tuple(rows)}

    @abstractmethod
    def _opened(self, info: PromptInfo) -> RequestState: ...


class _Request(RequestState):
    """Every layer and kv head places the prompt alike; decoded tokens end at one level, at once."""

    recent = -1

    def __init__(
        self,
        method: _Triaxial,
        info: PromptInfo,
        levels: torch.Tensor,
        decode_level: Level,
        unreachable: bool,
    ) -> None:
        """levels: [P] int64, `Level`'s value of each prompt token."""
        there = [level for level in Level if level and bool((levels == level).any())]
        self.levels = frozenset(level for level in {*there, decode_level} if level.is_low)
        self.acts_on_tokens = decode_level is not Level.HIGH
        self.shifted_keys = method.shifted_keys
        self.channel_keys = method.channel_keys and Level.LOW2 in there
        self.notes = (UNREACHABLE,) if unreachable else ()
        self._decoded = [decode_level] * info.layers
        self._placement = Placement()
        if bool((levels < Level.HIGH).any()):
            self._placement = Placement(
                {
                    level: (levels == level).nonzero()[:, 0].expand(info.kv_heads, -1)
                    for level in there
                }
            )

    def place(self, layer: int, captures: Captures) -> Placement:
        return self._placement

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        return self._decoded


@dataclass(frozen=True)
class TriAxialKV(_Triaxial):
    """The paper's method; `nominal` is its Bbits, the mean bits of a prompt token."""

    budget: float = 0.3125

    name: ClassVar[str] = "triaxialkv"
    label: ClassVar[str] = "TriAxialKV"
    paper: ClassVar[str] = "Shen et al. 2026, arXiv 2605.17170"
    color: ClassVar[str] = "#cc79a7"
    marker: ClassVar[str] = "v"
    knob: ClassVar[str] = "mean bits of a prompt token, Bbits"
    # All INT2 and all INT4; an answer, INT4 too, keeps a request above the lower end.
    budgets: ClassVar[tuple[float, float]] = (0.1875, 0.3125)
    knob_range: ClassVar[tuple[float, float]] = (2.0, 4.0)
    lowest: ClassVar[Level] = Level.LOW2
    shifted_keys: ClassVar[bool] = False
    channel_keys: ClassVar[bool] = True

    @property
    def setting(self) -> float:
        """Bbits: searched, or what gives the budget without rounding up to pages."""
        if self.nominal is not None:
            return self.nominal
        low, high = self.knob_range
        return min(max(16 * self.budget - 1, low), high)

    @cached_property
    def at_int4(self) -> frozenset[str]:
        """The tags that the map of the median prompt puts at INT4."""
        tags, lowest, low4, counts = zip(*self.sensitivity, strict=True)
        capacity = (self.setting - 2) * sum(counts)
        return frozenset(
            tags[n] for n in best_subset(_less(lowest, low4), [2 * n for n in counts], capacity)
        )

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All calibrated tags, the first to be at INT4 first."""
        tags, lowest, low4, counts = zip(*self.sensitivity, strict=True)
        ranked = [tags[n] for n in by_rate(_less(lowest, low4), counts)]
        return tuple(sorted(ranked, key=lambda tag: tag not in self.at_int4))

    def _opened(self, info: PromptInfo) -> RequestState:
        by_tag = tokens_by_tag(info, self.name)
        new = [tag for tag in by_tag if tag not in self.order]
        prompt, levels = info.prompt_tokens, torch.full((info.prompt_tokens,), int(Level.LOW2))
        wanted = math.floor((self.setting - 2) / 2 * prompt + 1e-9)
        if self.split_marginal:
            tags = [*new, *(tag for tag in self.order if tag in by_tag)]
            levels[torch.cat([by_tag[tag].flip(0) for tag in tags])[:wanted]] = Level.LOW4
        else:
            for tag in by_tag:
                if tag in new or tag in self.at_int4:
                    levels[by_tag[tag]] = Level.LOW4
        int2 = (levels == Level.LOW2).nonzero()[:, 0]
        levels[int2[len(int2) - len(int2) % CHANNEL_GROUP :]] = Level.LOW4
        return _Request(self, info, levels, Level.LOW4, wanted < prompt % CHANNEL_GROUP)


def _less(lowest: Sequence[float], low4: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(lowest, low4, strict=True)]


@dataclass(frozen=True)
class TriAxialRLH(_Triaxial):
    """The tags with release, INT4 and 16 bit; `nominal` is a share of Full KV's bytes."""

    budget: float = 0.33
    decode_level: str = "high"

    name: ClassVar[str] = "triaxialkv_rlh"
    label: ClassVar[str] = "TriAxialKV, R/L/H"
    paper: ClassVar[str] = "tags of Shen et al. 2026, arXiv 2605.17170, with PASK's actions"
    color: ClassVar[str] = "#882255"
    marker: ClassVar[str] = "<"
    knob: ClassVar[str] = "share of Full KV's bytes"
    budgets: ClassVar[tuple[float, float]] = (0.05, 1.0)
    lowest: ClassVar[Level] = Level.RELEASE
    shifted_keys: ClassVar[bool] = True
    channel_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decode_level not in ("high", "low4"):
            raise ValueError(f"{self.name}: decode_level {self.decode_level!r}, not high or low4")

    @cached_property
    def steps(self) -> tuple[tuple[str, Level, Level], ...]:
        """(tag, from, to) in the order in which bytes are spent."""
        levels = (Level.RELEASE, Level.LOW4, Level.HIGH)
        costs = (0.0, LOW4_COST, 1.0)
        ranked = [
            (-saved / count, tag, levels[a], levels[b])
            for tag, released, low4, count in self.sensitivity
            for a, b, saved in convex_steps(costs, (released, low4, 0.0))
        ]
        return tuple(step[1:] for step in sorted(ranked))

    def _opened(self, info: PromptInfo) -> RequestState:
        by_tag = tokens_by_tag(info, self.name)
        known = {row[0] for row in self.sensitivity}
        steps = [(tag, Level.RELEASE, Level.HIGH) for tag in by_tag if tag not in known]
        steps += [step for step in self.steps if step[0] in by_tag]
        tokens = torch.cat([by_tag[tag].flip(0) for tag, _, _ in steps])
        sizes = torch.tensor([len(by_tag[tag]) for tag, _, _ in steps])
        before, after = (
            torch.tensor([step[side] for step in steps]).repeat_interleave(sizes) for side in (1, 2)
        )
        decode = Level.HIGH if self.decode_level == "high" or self.setting >= 1 else Level.LOW4
        held = held_slots(info, before, after, decode)
        allowed = held <= self.setting * full_slots(info)
        if not self.split_marginal:
            whole = torch.zeros_like(allowed)
            whole[sizes.cumsum(0) - 1] = True
            allowed &= whole
        too_much = not bool(allowed.any())
        if too_much:
            allowed = held == held.min()
        taken = int(allowed.nonzero()[-1]) + 1
        levels = torch.zeros(info.prompt_tokens, dtype=torch.int64)
        levels.scatter_reduce_(0, tokens[:taken], after[:taken], "amax")
        return _Request(self, info, levels, decode, too_much)
