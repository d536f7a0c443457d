"""Figures 1 and 3 of the paper from a policy file: D against V, and cost against reliability."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from pask.report import style
from pask.report.policy_correlation import RankCorrelation

MAX_ALPHA = 10.0  # points: as far as Figure 3 goes
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito
_MARKERS = ("o", "s", "^", "D", "v", "P")


def mismatch_figure(
    buckets: pd.DataFrame,
    found: Mapping[tuple[str, str], RankCorrelation],
    folder: Path,
    about: str,
    stem: str,
) -> list[Path]:
    """Figure 1 as data: D against V of every bucket, a panel a side; the files written.

    Filled: the lowest level; hollow: the others. A D of exactly 0 is drawn at the left edge. Grey
    band: one row of failures either way.
    """
    sides = list(dict.fromkeys(buckets["side"]))
    with style.house_style():
        figure = Figure(figsize=(style.PAGE, 2.9), layout="constrained")
        panels = figure.subplots(1, len(sides), squeeze=False)[0]
        for axes, side in zip(panels, sides, strict=True):
            own = buckets[buckets["side"] == side]
            _scatter(axes, own, {level: one for (s, level), one in found.items() if s == side})
            axes.set_title(f"{side} side, {own['rows'].iloc[0]} calibration rows", fontsize=7.5)
            axes.set_xlabel("distortion D", fontsize=7)
        panels[0].set_ylabel("failures V, points", fontsize=7)
        title = f"Does distortion know which buckets answers fail by?\n{about}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=8, fontweight="bold")
        return style.save(figure, folder, stem)


def _scatter(axes: Axes, own: pd.DataFrame, found: Mapping[str, RankCorrelation]) -> None:
    positive = own.loc[own["distortion"] > 0, "distortion"]
    edge = float(positive.min()) / 3 if len(positive) else 0.1
    one_row = 100 / float(own["rows"].iloc[0])
    axes.axhspan(-one_row, one_row, color=style.GRID, linewidth=0, zorder=0)
    axes.axhline(0, color=style.REFERENCE, linewidth=0.6, zorder=1)
    for at, (level, one) in enumerate(found.items()):
        rows = own[own["level"] == level]
        color = _COLORS[at % len(_COLORS)]
        axes.plot(
            rows["distortion"].clip(lower=edge), rows["v_pp"], _MARKERS[at % len(_MARKERS)],
            color=color, markerfacecolor=color if at == 0 else "none", markersize=4,
            markeredgewidth=0.8, linestyle="none", label=f"{level}: {_rho(one)}",
            zorder=3 - at / 10,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.tick_params(axis="x", which="minor", length=0)
    axes.legend(fontsize=6, frameon=False, loc="upper left")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.25 * (high - low))  # room for the legend


def _rho(one: RankCorrelation) -> str:
    if np.isnan(one.rho):
        return f"all alike (n = {one.n})"
    interval = "" if np.isnan(one.low) else f" [{one.low:.2f}, {one.high:.2f}]"
    return f"ρ = {one.rho:.2f}{interval}, n = {one.n}".replace("-", "−")


def cost_figure(
    candidates: pd.DataFrame,
    curve: pd.DataFrame,
    alpha_pp: Mapping[str, float],
    folder: Path,
    about: str,
    stem: str,
) -> list[Path]:
    """Figure 3: the cheapest admissible C_KV against alpha, through the candidates tried.

    `candidates`: `candidate_frame`s of one policy's sides in one, `curve`: their `frontier`s,
    `alpha_pp`: the tolerance of each side, the dashed line. The ring is the selected candidate, its
    bar the interval of its increase. The files written.
    """
    sides = list(dict.fromkeys(candidates["side"]))
    with style.house_style():
        figure = Figure(figsize=(style.PAGE, 2.9), layout="constrained")
        panels = figure.subplots(1, len(sides), squeeze=False)[0]
        for axes, side in zip(panels, sides, strict=True):
            own = candidates[candidates["side"] == side]
            _cost_panel(axes, own, curve[curve["side"] == side], alpha_pp[side])
            outside = int((own["increase_pp"] > MAX_ALPHA + 0.5).sum())
            more = f"; {outside} of {len(own)} further right" if outside else ""
            axes.set_title(f"{side} side, n = {own['rows'].iloc[0]}{more}", fontsize=7.5)
            axes.set_xlabel("tolerance α, and increase in failures, points", fontsize=7)
        panels[0].set_ylabel("cheapest C_KV of the side, %", fontsize=7)
        # The panels mark the same things, and candidates may be anywhere in them.
        marks = {name: handle for axes in panels for handle, name in _marks(axes)}
        figure.legend(marks.values(), marks, fontsize=6, frameon=False, loc="outside lower center",
                      ncols=len(marks))  # fmt: skip
        title = f"Reliability against cost\n{about}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=8, fontweight="bold")
        return style.save(figure, folder, stem)


def _marks(axes: Axes) -> list[tuple[Artist, str]]:
    return list(zip(*axes.get_legend_handles_labels(), strict=True))


def _cost_panel(axes: Axes, own: pd.DataFrame, curve: pd.DataFrame, alpha: float) -> None:
    axes.axvline(alpha, color=style.REFERENCE, linewidth=0.8, linestyle="--", zorder=1)
    axes.plot(curve["alpha_pp"], 100 * curve["b"], drawstyle="steps-post", color=style.INK,
              linewidth=1.4, zorder=2)  # fmt: skip
    pairs = own.groupby(["tau_low_pct", "tau_high_pct"], sort=False, dropna=False)
    for at, ((low, high), rows) in enumerate(pairs):
        name = "no floors" if np.isnan(low) else f"τ = {low:g} / {high:g} %"
        axes.plot(
            rows["increase_pp"], 100 * rows["b"], _MARKERS[at % len(_MARKERS)], markersize=3.6,
            color=_COLORS[at % len(_COLORS)], markerfacecolor="none", markeredgewidth=0.8,
            linestyle="none", label=name, zorder=3,
        )  # fmt: skip
    for row in own[own["selected"] == 1].to_dict("records"):
        axes.plot((row["increase_low"], row["increase_high"]), [100 * row["b"]] * 2,
                  color=style.SOFT, linewidth=0.8, zorder=1.5,
                  label="selected: 95 % interval")  # fmt: skip
        axes.plot(row["increase_pp"], 100 * row["b"], "o", markersize=9, color=style.INK,
                  markerfacecolor="none", markeredgewidth=0.9, zorder=4)  # fmt: skip
    axes.set_xlim(min(-0.5, float(own["increase_pp"].min()) - 0.5), MAX_ALPHA + 0.5)
    axes.set_ylim(0, 104)
