"""Which groups of tokens get more bits: small knapsacks without chance, and what tokens cost.

A group has a loss at each of its levels and a cost; both are sums over its tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pask.methods.levels import Level

if TYPE_CHECKING:
    from pask.methods.contract import PromptInfo

LOW4_COST = 5 / 16
"""Bytes of a LOW4 slot over a HIGH one's: 4 bits, and for 32 numbers 2 times 16 bits of range."""

EXACT_ITEMS = 22
"""Up to so many items all subsets are compared (4 million, some 0.1 GB for a moment)."""


def best_subset(gains: Sequence[float], weights: Sequence[int], capacity: float) -> frozenset[int]:
    """The items whose gains have the largest sum while their weights sum to at most `capacity`.

    Exact for up to `EXACT_ITEMS` items; beyond, items are taken by gain per weight as long as they
    fit (an item that does not fit is passed over). Of equal sums the lighter subset is taken, then
    the one that lacks the last item in which they differ. Weights are at least 1, a gain may be
    negative (never taken). ValueError otherwise.
    """
    if len(gains) != len(weights) or any(weight < 1 for weight in weights):
        raise ValueError("every item has a gain and a weight of at least 1")
    if len(gains) > EXACT_ITEMS:
        return _by_rate(gains, weights, capacity)
    # Subset number n holds the items whose bits are set in n.
    gain = torch.zeros(1, dtype=torch.float64)
    weight = torch.zeros(1, dtype=torch.int64)
    for own_gain, own_weight in zip(gains, weights, strict=True):
        gain = torch.cat((gain, gain + own_gain))
        weight = torch.cat((weight, weight + own_weight))
    fits = weight <= capacity
    if not bool(fits.any()):
        return frozenset()
    best = fits & (gain == gain[fits].max())
    lightest = best & (weight == weight[best].min())
    number = int(lightest.nonzero()[0])
    return frozenset(item for item in range(len(gains)) if number >> item & 1)


def by_rate(gains: Sequence[float], weights: Sequence[int]) -> list[int]:
    """All items, the one with the largest gain per weight first; of equals the earlier one."""
    rate = [gain / weight for gain, weight in zip(gains, weights, strict=True)]
    return sorted(range(len(rate)), key=lambda item: (-rate[item], item))


def _by_rate(gains: Sequence[float], weights: Sequence[int], capacity: float) -> frozenset[int]:
    taken, left = set(), capacity
    for item in by_rate(gains, weights):
        if gains[item] > 0 and weights[item] <= left:
            taken.add(item)
            left -= weights[item]
    return frozenset(taken)


def convex_steps(costs: Sequence[float], losses: Sequence[float]) -> list[tuple[int, int, float]]:
    """From the cheapest level to the dearest, over those that lie on the lower convex hull.

    costs: ascending, without repeats; losses: one a level. Answers (from, to, loss saved per cost)
    in order of cost; the last never rises. A level above the line between two others is passed
    over: where part of a group may have another level than the rest, a mixture of the two is
    better. Taking the steps of all groups in order of what they save therefore gives the least loss
    at every cost. A level on the line stays.
    """
    hull: list[int] = []
    for level in range(len(costs)):
        while len(hull) > 1 and _saved(costs, losses, hull[-2], hull[-1]) < _saved(
            costs, losses, hull[-1], level
        ):
            hull.pop()
        hull.append(level)
    return [(a, b, _saved(costs, losses, a, b)) for a, b in itertools.pairwise(hull)]


def _saved(costs: Sequence[float], losses: Sequence[float], a: int, b: int) -> float:
    return (losses[a] - losses[b]) / (costs[b] - costs[a])


def full_slots(info: PromptInfo) -> int:
    """Slots that Full KV holds at the end per layer and kv head, in whole pages."""
    total = info.prompt_tokens + info.expected_new_tokens
    return -(-total // info.page_slots) * info.page_slots


def held_slots(
    info: PromptInfo, before: torch.Tensor, after: torch.Tensor, decode: Level
) -> torch.Tensor:
    """Bytes held at the end of a request per layer and kv head, in slots of HIGH, by step.

    Each step moves one prompt token from RELEASE or LOW4 to LOW4 or HIGH: before, after [steps]
    int64, `Level`'s values. Decoded tokens, as many as expected, are all at `decode` (LOW4 or
    HIGH). Pages count whole; where there are LOW4 tokens so do the two vectors of key statistics.
    Answers [steps] fp64.
    """
    expected = info.expected_new_tokens
    high = (after == Level.HIGH).long().cumsum(0)
    low = ((after == Level.LOW4).long() - (before == Level.LOW4).long()).cumsum(0)
    extra = (low > 0).double()  # two fp16 vectors of head_dim: as much as one token
    if decode is Level.HIGH:
        high = high + expected
    else:
        low, extra = low + expected, torch.ones_like(extra)
    high, low = (-(-slots // info.page_slots) * info.page_slots for slots in (high, low))
    return high.double() + LOW4_COST * low.double() + extra
