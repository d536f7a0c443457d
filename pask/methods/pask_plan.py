"""What a request's bytes buy under PASK's policy: the prompt's levels, and the answer's budget.

All choices of one request lie on one chain, each with at least the levels of the one before: the
decode side at its floors, and the prompt up to its floors (`PromptChain.below`); the decode side's
selected candidate; the prompt's upgrades (`PromptChain.above`) and the decode side's later
candidates, either all of the prompt's first or side by side, the most worthwhile first; at last
everything at HIGH.
The prompt goes up token by token, an upgrade's newest tokens first. Taken is the last choice whose
expected bytes are within the knob's share, and of a request that has none the one that holds least.
So the expected bytes never shrink as the knob grows.

Bytes are counted in slots: one token at HIGH in all layers is 1, a layer group counts by its share
of the layers. For T expected new tokens, which a decode candidate spreads over levels in the
proportions of the calibration answers, and whole pages of every level in every group:

    sum over groups c of share(c) (sum over levels a of cost(a) pages(prompt(c, a) + T answer(c, a))
                                   + the ring of recent tokens where some end below HIGH)
    + 1 where low levels are used (the two vectors of key statistics).

A decode candidate whose saving T (1 - cost) does not pay for its ring is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch

from pask.methods.bit_solver import full_slots
from pask.methods.contract import PromptInfo
from pask.methods.levels import Level
from pask.policy.actions import level_cost
from pask.policy.evidence import Evidence
from pask.policy.path import Upgrade, candidate, cost, worth
from pask.policy.policy import SidePolicy
from pask.structure.buckets import LayerBucket
from pask.structure.labels import Label

_ROUNDING = 1e-9  # sums that differ by less than this many tokens or slots are equal


@dataclass(frozen=True)
class DecodeChain:
    """Ways to treat the answer, each with at least the levels of the one before.

    The first is the floors, the second the selected candidate, then those further up its path; in
    the last all stays at HIGH. `steps`: where on the path tokens start, None where the side does
    not act at all; at the floors as in the selected candidate, from which tokens are demoted.
    `shares` [ways, groups, kept levels] fp64: how the answer's tokens are expected to spread over
    the levels, by group. `costs` [ways] fp64: slots of a token. `worth` [ways - 2] fp64: of each
    way after the second, as `pask.policy.path.worth`; -inf: after all of the prompt's upgrades.
    """

    steps: tuple[int | None, ...]
    shares: torch.Tensor
    costs: torch.Tensor
    worth: torch.Tensor

    @classmethod
    def of(cls, side: SidePolicy, *, prompt_first: bool = True) -> DecodeChain:
        """Expectations from the side's own evidence. With `prompt_first` its later candidates wait
        until the prompt is whole."""
        later = side.path[side.steps :]
        steps = range(side.steps, len(side.path) + 1)
        tables = [side.floors, *(candidate(side.floors, side.path, n) for n in steps)]
        return cls(
            (side.steps, *steps, None),
            torch.stack(
                [*(_shares(side.evidence, table) for table in tables), _at_high(side.evidence)]
            ),
            torch.tensor(
                [*(cost(side.evidence, table) for table in tables), 1.0], dtype=torch.float64
            ),
            torch.tensor(
                [-inf if prompt_first else worth(side.evidence, up) for up in later] + [-inf],
                dtype=torch.float64,
            ),
        )

    @classmethod
    def left_alone(cls, evidence: Evidence) -> DecodeChain:
        """Every decoded token at HIGH, in the groups and levels of `evidence`."""
        ways = 3
        shares = _at_high(evidence).expand(ways, -1, -1)
        ones = torch.ones(ways, dtype=torch.float64)
        return cls((None,) * ways, shares, ones, -inf * ones[2:])

    def rings(self, recent: int, page_slots: int) -> torch.Tensor:
        """[ways, groups] fp64: slots of the rings of recent tokens, 0 where all end at HIGH."""
        ring = -(-(recent + 1) // page_slots) * page_slots
        return (self.shares[..., -1] < 1 - _ROUNDING).double() * ring

    def paying(self, info: PromptInfo, recent: int, weights: torch.Tensor) -> DecodeChain:
        """The same without what does not pay for its rings; `weights` [groups].

        Floors and selected candidate, of which there has to be one, have HIGH instead.
        """
        saved = info.expected_new_tokens * (1 - self.costs)
        pays = saved > self.rings(recent, info.page_slots) @ weights + _ROUNDING
        kept = pays.clone()
        kept[[0, 1, -1]] = True
        return DecodeChain(
            tuple(
                steps if acts else None
                for steps, acts, stays in zip(self.steps, pays.tolist(), kept.tolist(), strict=True)
                if stays
            ),
            torch.where(pays[:, None, None], self.shares, self.shares[-1])[kept],
            torch.where(pays, self.costs, self.costs[-1])[kept],
            self.worth[kept[2:]],
        )


def _at_high(evidence: Evidence) -> torch.Tensor:
    """[groups, kept levels] fp64, as `DecodeChain.shares`."""
    shares = torch.zeros(len(evidence.groups), len(evidence.ladder.actions) - 1)
    shares[:, -1] = 1
    return shares.double()


def _shares(evidence: Evidence, table: Mapping[LayerBucket, Level]) -> torch.Tensor:
    """[groups, kept levels] fp64, as `DecodeChain.shares`; tokens in no level are released."""
    groups, kept = len(evidence.groups), evidence.ladder.actions[1:]
    tokens = [[0.0] * len(evidence.ladder.actions) for _ in range(groups)]
    for found in evidence.buckets:
        place = evidence.ladder.actions.index(table[found.bucket])
        tokens[found.bucket.group][place] += found.tokens
    counts = torch.tensor(tokens, dtype=torch.float64)
    return counts[:, -len(kept) :] / counts.sum(dim=1, keepdim=True).clamp(min=1e-300)


@dataclass(frozen=True)
class PromptChain:
    """The prompt's buckets from their lowest levels `start` up to HIGH, one upgrade at a time:
    those `below` the floors, then those `above`, each with its `worth`: infinite where the bucket
    did harm, else `pask.policy.path.worth`."""

    start: Mapping[LayerBucket, Level]
    below: tuple[Upgrade, ...]
    above: tuple[Upgrade, ...]
    worth: tuple[float, ...]

    @classmethod
    def of(cls, side: SidePolicy) -> PromptChain:
        """From nothing: up to the floors what did most harm first, then what did any, then by D."""
        rest = side.above[len(side.mending) :]
        found = (inf,) * len(side.mending) + tuple(worth(side.evidence, up) for up in rest)
        return cls(dict.fromkeys(side.floors, Level.RELEASE), side.below, side.above, found)

    @classmethod
    def from_floors(cls, side: SidePolicy) -> PromptChain:
        """Nothing below the floors, and above them the side's path, as candidates are made."""
        found = tuple(worth(side.evidence, up) for up in side.path)
        return cls(side.floors, (), side.path, found)


@dataclass(frozen=True)
class Plan:
    """What a request gets.

    `prompt`: [groups, P] int64, `Level`'s value of each prompt token, or None for a whole prompt.
    `steps`: the decode candidate that tokens start from, None where the answer stays at HIGH.
    `remaining`: R_0, the slots that the answer may take; `floors_ahead`, `selected_ahead`: what a
    long one takes at its floors, and as that candidate has it. `unreachable`: the request is
    expected to take more than the knob asks for, with the decode side at its floors and nothing of
    the prompt kept that may go. `below_floors`: the prompt is not at its floors.
    """

    prompt: torch.Tensor | None
    steps: int | None
    remaining: float
    floors_ahead: float
    selected_ahead: float
    unreachable: bool
    below_floors: bool


def plan(
    info: PromptInfo,
    setting: float,
    decode: DecodeChain,
    prompt: PromptChain | None,
    evidence: Evidence,
    *,
    recent: int,
    sinks: int,
    margin: float,
) -> Plan:
    """The request's place on the chain at the knob's value `setting`, below 1.

    `prompt` None keeps the prompt whole; `evidence` says which groups and levels there are (either
    side's). The first `sinks` prompt tokens, the last one, and labels without evidence stay at
    HIGH. R_0 is what the answer's candidate takes of a long answer while the prompt is not whole
    (less where the decode side is at its floors), and then all that is left too. A long answer has
    `margin` times the expected tokens: budgets are met on average, and what short answers leave
    pays for long ones. ValueError for a prompt side without labels.
    """
    layers = torch.tensor(evidence.groups, dtype=torch.float64)
    weights = layers / layers.sum()
    decode = decode.paying(info, recent, weights)
    walk = _Walk.of(info, prompt, evidence, sinks)
    upgrades = len(walk.tokens)
    way, taken = _choices(decode, walk)
    counts, shares = walk.counts[taken], decode.shares[way]
    slots = counts + info.expected_new_tokens * shares
    pages = (slots / info.page_slots - _ROUNDING).ceil() * info.page_slots
    costs = [level_cost(level) for level in evidence.ladder.actions[1:]]
    by_group = pages @ torch.tensor(costs, dtype=torch.float64)
    by_group += decode.rings(recent, info.page_slots)[way]
    acts = torch.tensor([steps is not None and len(costs) > 1 for steps in decode.steps])
    statistics = (counts[..., :-1].sum(dim=(1, 2)) > 0) | acts[way]
    held = by_group @ weights + statistics

    allowed = setting * full_slots(info)
    fits = held <= allowed + _ROUNDING
    unreachable = not bool(fits.any())
    if unreachable:
        fits = held <= held.min() + _ROUNDING
    at = int(fits.nonzero()[-1])
    long = margin * info.expected_new_tokens * decode.costs
    remaining = float(long[way[at]] + allowed - held[at])
    if way[at] == 0 or taken[at] < upgrades:
        remaining = min(remaining, float(long[max(1, int(way[at]))]))
    return Plan(
        walk.levels(info, int(taken[at])),
        decode.steps[int(way[at])],
        max(0.0, remaining),
        float(long[0]),
        float(long[max(1, int(way[at]))]),
        unreachable,
        int(taken[at]) < walk.to_floors,
    )


def _choices(decode: DecodeChain, walk: _Walk) -> tuple[torch.Tensor, torch.Tensor]:
    """The chain: [n] int64 a way to treat the answer, and [n] so many of the prompt's steps.

    A step or way comes when it is worth most of what is next on either side, and no earlier than
    those before it on its own; of equals the prompt's come first.
    """
    below = torch.arange(walk.to_floors + 1)
    found = [side.cummin(0).values for side in (walk.worth, decode.worth) if len(side)]
    order = torch.cat(found).argsort(descending=True, stable=True)
    of_answer = order >= len(walk.worth)
    way = torch.cat((torch.zeros_like(below), torch.tensor([1]), 1 + of_answer.cumsum(0)))
    above = walk.to_floors + (~of_answer).cumsum(0)
    return way, torch.cat((below, below[-1:], above))


@dataclass(frozen=True)
class _Walk:
    """The prompt's chain: where its tokens begin, and one token of one group a step.

    `least` [groups, P] int64: the levels before the first step; `tokens`, `groups`, `ends` [n]
    int64: the step puts the token to the level; `counts` [n + 1, groups, kept levels] fp64: tokens
    at each level after so many steps; after `to_floors` steps the prompt is at its floors; `worth`
    [n - to_floors] fp64: of the steps from there on.
    """

    least: torch.Tensor
    tokens: torch.Tensor
    groups: torch.Tensor
    ends: torch.Tensor
    counts: torch.Tensor
    to_floors: int
    worth: torch.Tensor

    @classmethod
    def of(
        cls, info: PromptInfo, prompt: PromptChain | None, evidence: Evidence, sinks: int
    ) -> _Walk:
        groups, kept = len(evidence.groups), evidence.ladder.actions[1:]
        least = torch.full((groups, info.prompt_tokens), int(Level.HIGH))
        upgrades: list[Upgrade] = []
        worths: list[float] = []
        to_floors = 0
        tokens = [torch.zeros(0, dtype=torch.int64)]
        if prompt is not None:
            places = _places(info, sinks)
            for bucket, level in prompt.start.items():
                if bucket.name in places:
                    least[bucket.group, places[bucket.name]] = int(level)
            ups = (*prompt.below, *prompt.above)
            upgrades = [up for up in ups if up.bucket.name in places]
            values = zip(ups, (*[inf] * len(prompt.below), *prompt.worth), strict=True)
            worths = [value for up, value in values if up.bucket.name in places]
            to_floors = sum(len(places.get(up.bucket.name, ())) for up in prompt.below)
            tokens += [places[up.bucket.name].flip(0) for up in upgrades]
        sizes = torch.tensor([len(places) for places in tokens[1:]], dtype=torch.int64)
        group, start, end = (
            torch.tensor(numbers, dtype=torch.int64).repeat_interleave(sizes)
            for numbers in (
                [up.bucket.group for up in upgrades],
                [int(up.start) for up in upgrades],
                [int(up.end) for up in upgrades],
            )
        )
        steps = torch.arange(1, len(group) + 1)
        changes = torch.zeros(len(group) + 1, groups, len(kept), dtype=torch.float64)
        for place, level in enumerate(kept):
            changes[0, :, place] = (least == level).sum(dim=1)
            changes[steps, group, place] = (end == level).double() - (start == level).double()
        value = torch.tensor(worths, dtype=torch.float64).repeat_interleave(sizes)[to_floors:]
        return cls(least, torch.cat(tokens), group, end, changes.cumsum(0), to_floors, value)

    def levels(self, info: PromptInfo, taken: int) -> torch.Tensor | None:
        """[groups, P] after the first `taken` steps; None where all are at HIGH."""
        levels = self.least.clone()
        flat = self.groups[:taken] * info.prompt_tokens + self.tokens[:taken]
        levels.view(-1).scatter_reduce_(0, flat, self.ends[:taken], "amax")
        return None if bool((levels == Level.HIGH).all()) else levels


def _places(info: PromptInfo, sinks: int) -> dict[str, torch.Tensor]:
    """Positions [n] int64, ascending, of each label, without what stays at HIGH anyway."""
    if info.labels is None:
        raise ValueError("pask: the prompt side needs a prompt's labels, and the request has none")
    found: dict[Label, list[int]] = {}
    inner: Sequence[Label] = info.labels[: info.prompt_tokens - 1]
    for at, label in enumerate(inner):
        if at >= sinks:
            found.setdefault(label, []).append(at)
    return {str(label): torch.tensor(places) for label, places in found.items()}
