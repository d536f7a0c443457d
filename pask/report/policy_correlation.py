"""Figure 1 as a number: does distortion rank buckets as task failures do?

Spearman's rank correlation, ties at their mean rank. The layer groups of one bucket name depend on
each other, so both the interval and the test move names whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pask.report.statistics import RESAMPLES, SEED

Floats = NDArray[np.float64]
_LEAST_NAMES = 3  # with fewer there is neither an interval nor a test


@dataclass(frozen=True)
class RankCorrelation:
    """`rho` of n pairs from `names` clusters; NaN where one of the two does not vary.

    `low`, `high`: percentile interval of a bootstrap of names, from those `draws` in which both
    vary. `p`: two-sided permutation test.
    """

    rho: float
    low: float
    high: float
    p: float
    n: int
    names: int
    draws: int


def rank_correlation(
    x: Sequence[float],
    y: Sequence[float],
    names: Sequence[str],
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> RankCorrelation:
    """Spearman's rho of x and y; items with one of `names` are drawn and permuted together.

    In the permutation a name's y go, in order, to another name with as many items. The same seed
    gives the same figures. ValueError for lengths that differ.
    """
    if not len(x) == len(y) == len(names):
        raise ValueError(f"rank correlation: {len(x)}, {len(y)} and {len(names)} values")
    xs, ys = _by_name(x, names), _by_name(y, names)
    clusters = len(xs)
    rho = float(_correlation(_ranked(xs.reshape(1, -1)), _ranked(ys.reshape(1, -1)))[0])
    if np.isnan(rho) or clusters < _LEAST_NAMES:
        return RankCorrelation(rho, nan, nan, nan, len(x), clusters, 0)
    random = np.random.default_rng(seed)
    drawn = random.integers(clusters, size=(resamples, clusters))
    rhos = _correlation(
        _ranked(xs[drawn].reshape(resamples, -1)), _ranked(ys[drawn].reshape(resamples, -1))
    )
    rhos = rhos[~np.isnan(rhos)]
    low, high = np.quantile(rhos, [0.5 - level / 2, 0.5 + level / 2])
    p = _permutation_p(xs, ys, rho, resamples, random)
    return RankCorrelation(rho, float(low), float(high), p, len(x), clusters, len(rhos))


def _by_name(values: Sequence[float], names: Sequence[str]) -> Floats:
    """(names, most items of a name); NaN where a name has fewer."""
    items = pd.Series(np.asarray(values, dtype=float)).groupby(np.asarray(names), sort=False)
    rows = [group.to_numpy() for _, group in items]
    table = np.full((len(rows), max(map(len, rows), default=0)), nan)
    for at, row in enumerate(rows):
        table[at, : len(row)] = row
    return table


def _ranked(rows: Floats) -> Floats:
    """Mean ranks within each row; NaN keeps none."""
    return np.asarray(pd.DataFrame(rows).rank(axis=1), dtype=float)


def _correlation(x: Floats, y: Floats) -> Floats:
    """Pearson's correlation row by row over what is not NaN; NaN where a row does not vary."""
    x = x - np.nanmean(x, axis=1, keepdims=True)
    y = y - np.nanmean(y, axis=1, keepdims=True)
    scale = np.sqrt(np.nansum(x * x, axis=1) * np.nansum(y * y, axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        result = np.nansum(x * y, axis=1) / scale
    return np.where(scale > 0, result, nan)


def _permutation_p(
    xs: Floats, ys: Floats, rho: float, resamples: int, random: np.random.Generator
) -> float:
    x_ranks = _ranked(xs.reshape(1, -1))
    y_ranks = _ranked(ys.reshape(1, -1)).reshape(ys.shape)
    sizes = np.sum(~np.isnan(xs), axis=1)
    order = np.tile(np.arange(len(xs)), (resamples, 1))
    for size in np.unique(sizes):
        alike = np.flatnonzero(sizes == size)
        order[:, alike] = random.permuted(np.tile(alike, (resamples, 1)), axis=1)
    rhos = _correlation(x_ranks, y_ranks[order].reshape(resamples, -1))
    as_far = int(np.sum(np.abs(rhos) >= abs(rho) - 1e-12))
    return (1 + as_far) / (1 + resamples)
