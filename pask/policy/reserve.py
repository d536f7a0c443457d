"""Gamma(s): budget kept back for protected tokens that are still to come (Equation 9)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil

from pask.methods.levels import Level
from pask.policy.actions import stored_bits, token_bits
from pask.structure.buckets import LayerBucket


def reserve(
    traces: Sequence[Sequence[str]],
    floors: Mapping[LayerBucket, Level],
    groups: Sequence[int],
    beta: float,
) -> dict[str, float]:
    """Gamma of every parser state of the traces, in units of one token at HIGH in all layers.

    A trace is the bucket names of an answer's tokens, in order, and the state at a token is its
    name: the coarsened tag is all that a policy sees of the parser. C_future is what the tokens
    after it cost at their floors; a name that `floors` lacks is at HIGH, as in `lookup`. Names
    come sorted. `groups`: layers in each group. ValueError unless 0 <= beta <= 1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"reserve: beta {beta} is outside 0..1")
    future: defaultdict[str, list[int]] = defaultdict(list)
    costs = {
        name: token_bits(
            (floors.get(LayerBucket(name, group), Level.HIGH) for group in range(len(groups))),
            groups,
        )
        for name in {name for trace in traces for name in trace}
    }
    for trace in traces:
        total = 0
        for name in reversed(trace):
            future[name].append(total)
            total += costs[name]
    unit = stored_bits(Level.HIGH) * sum(groups)
    return {name: quantile(values, beta) / unit for name, values in sorted(future.items())}


def quantile(values: Sequence[float], beta: float) -> float:
    """Q_beta: the least of the values that a share `beta` of them does not exceed.

    The inverse of the empirical distribution function, so one of the values; their least for 0.
    """
    # The decimal as written: 0.55 of 100 values are 55, though 0.55 * 100 is above 55 in binary.
    rank = ceil(Fraction(repr(float(beta))) * len(values))
    return sorted(values)[max(rank, 1) - 1]
