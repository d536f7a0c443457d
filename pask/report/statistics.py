"""The few statistics that the tables need, exact where that is cheap, seeded where it is not.

Sources: Wilson 1927 (score interval); McNemar 1947 in its exact binomial form; cluster bootstrap
after Cameron, Gelbach and Miller 2008, percentile interval; Holm 1979.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from math import comb, nan, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES, SEED = 10_000, 0


def rounded(value: float, digits: int) -> str:
    """`value` with so many decimals, halves away from zero: the one rounding rule of all tables.

    The shortest decimal that names the float is what gets rounded, so a percentage 100 * k / n
    that lies on a half is rounded up however binary stores it. Never prints "-0.00".
    """
    result = Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return str(abs(result) if result == 0 else result)


def wilson(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of the proportion k / n, both ends in 0..1.

    Raises ValueError unless 0 <= k <= n and n >= 1.
    """
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"wilson: no proportion in {k} of {n}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = k / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if k == 0 else centre - half
    high = 1.0 if k == n else centre + half
    return low, high


@dataclass(frozen=True)
class McNemar:
    """`b`: first right and second wrong; `c`: the other way round; `p`: exact and two-sided."""

    b: int
    c: int
    p: float


def mcnemar(first: ArrayLike, second: ArrayLike) -> McNemar:
    """Exact McNemar test of two paired 0/1 vectors of one length."""
    first, second = _paired(first, second)
    b = int(np.sum((first == 1) & (second == 0)))
    c = int(np.sum((first == 0) & (second == 1)))
    tail = sum(comb(b + c, i) for i in range(min(b, c) + 1))
    return McNemar(b, c, min(1.0, 2 * tail / 2 ** (b + c)))


@dataclass(frozen=True)
class Difference:
    """Mean of first minus mean of second, as a proportion, with its percentile interval.

    `clusters` is how many independent units were resampled; with fewer than two there is no
    interval and both ends are NaN.
    """

    estimate: float
    low: float
    high: float
    clusters: int


def paired_difference(
    first: ArrayLike,
    second: ArrayLike,
    clusters: Sequence[str] | NDArray[np.str_],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Difference:
    """Paired cluster bootstrap of the difference in accuracy of two 0/1 vectors.

    Whole clusters are drawn with replacement, each item's pair staying together; a draw's
    difference is the sum of its differences over its number of items. The same seed gives the same
    interval, whatever the order of the items.
    """
    first, second = _paired(first, second)
    if len(clusters) != len(first):
        raise ValueError(f"{len(clusters)} cluster names for {len(first)} pairs")
    names, member = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    gains = np.bincount(member, weights=first - second)
    sizes = np.bincount(member)
    estimate = float(gains.sum() / sizes.sum())
    if len(names) < 2:
        return Difference(estimate, nan, nan, len(names))
    draws = np.random.default_rng(seed).integers(
        len(names), size=(resamples, len(names)), dtype=np.int32
    )
    means = gains[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return Difference(estimate, float(low), float(high), len(names))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def _paired(first: ArrayLike, second: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    a, b = np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64)
    if a.ndim != 1 or a.shape != b.shape or a.size == 0:
        raise ValueError(f"not two paired vectors: shapes {a.shape} and {b.shape}")
    if not (np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all()):
        raise ValueError("paired vectors must hold only 0 and 1")
    return a, b
