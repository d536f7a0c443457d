"""Attention taken apart: over some of the tokens alone, and put together again.

Softmax attention over a union of disjoint sets of tokens is the mean of the attention over each,
weighted by the sums of exponentials: with lse_j the log of set j's sum and o_j its output,

    o = sum_j w_j o_j,   w_j = exp(lse_j - logsumexp_i lse_i)

So when one set is changed the others are not computed again, and none of them is ever subtracted
from a sum: where one set holds nearly all of the mass, what is left without it keeps its digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NOTHING = torch.finfo(torch.float32).min
"""Stands for -inf where one is subtracted from another."""


@dataclass(frozen=True)
class Part:
    """Attention of some rows over one set of tokens: `lse` [..., rows], `out` [..., rows,
    head_dim], fp32. A row that sees none of the set has an lse of -inf and an output of 0."""

    lse: torch.Tensor
    out: torch.Tensor

    @classmethod
    def over(cls, scores: torch.Tensor, values: torch.Tensor) -> Part:
        """From scaled scores [..., rows, n], -inf where a row does not see a token, and values
        [..., n, head_dim]; n may be 0."""
        if not scores.shape[-1]:
            nothing = scores.new_zeros(*scores.shape[:-1], values.shape[-1])
            return cls(scores.new_full(scores.shape[:-1], float("-inf")), nothing)
        peak = scores.amax(-1, keepdim=True).clamp_(min=_NOTHING)
        weights = (scores - peak).exp_()
        total = weights.sum(-1, keepdim=True)
        least = torch.finfo(total.dtype).tiny  # below what a row that sees a token can have, 1
        return cls((peak + total.log()).squeeze(-1), weights @ values / total.clamp(min=least))

    @classmethod
    def stacked(cls, parts: Sequence[Part]) -> Part:
        """Parts of the same rows in a new first dimension."""
        return cls(torch.stack([p.lse for p in parts]), torch.stack([p.out for p in parts]))

    def and_also(self, last: Part) -> Part:
        """Stacked parts with one more."""
        pairs = ((self.lse, last.lse), (self.out, last.out))
        return Part(*(torch.cat((stack, one[None])) for stack, one in pairs))


def without_each(parts: Part, count: int) -> Part:
    """For each of the first `count` of stacked `parts`, all the others together: [count, ...]."""
    number = len(parts.lse)
    own = torch.eye(count, number, dtype=torch.bool)
    own = own.view(count, number, *[1] * (parts.lse.ndim - 1))
    lse = parts.lse.masked_fill(own, float("-inf"))  # [count, number, ..., rows]
    together = lse.logsumexp(1)
    weights = (lse - together.clamp(min=_NOTHING)[:, None]).exp_()
    return Part(together, torch.einsum("bj...,j...d->b...d", weights, parts.out))


def squared_change(rest: Part, before: Part, after: Part | None) -> torch.Tensor:
    """||o - o'||_2^2 [..., rows], o over `rest` and `before`, o' over `rest` and `after` (None:
    over `rest` alone). Every row must see some of `rest`.

    o = rest + w (before - rest), w = sigmoid(lse_before - lse_rest); so what o and o' share is
    never computed.
    """
    change = _pull(rest, before)
    if after is not None:
        change -= _pull(rest, after)
    return change.square_().sum(-1)


def _pull(rest: Part, part: Part) -> torch.Tensor:
    """What a part adds to the output over `rest`, [..., rows, head_dim]."""
    return (part.lse - rest.lse).sigmoid_()[..., None] * (part.out - rest.out)
