"""A policy's buckets as a heat map: what lowering each one does, and the level it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pask.policy.actions import level_named, stored_bits
from pask.report import style
from pask.report.policy_frames import layer_names
from pask.report.statistics import rounded

_ROW, _TEXT, _LEAST_CELL = 0.155, 5.2, 0.24  # inches, points, inches that a cell's text takes
_NAMES, _PANEL_GAP, _AROUND = 1.95, 0.12, 0.48  # inches
_NO_BUCKET = "#f0f0f0"

Panel = tuple[str, NDArray[Any], list[list[str]], Any, float]  # title, values, texts, map, top


def heat_map(
    buckets: pd.DataFrame, groups: tuple[int, ...], folder: Path, about: str, stem: str
) -> list[Path]:
    """Every bucket's V-bar, D and levels: a row a name, a column a layer group; the files written.

    `buckets`: `bucket_frame`s of one policy's sides, in one. The highest level below HIGH and the
    lowest have a panel of V-bar each; D is the lowest's. White is 0, dark the side's largest; grey
    is no such bucket. Letters are floor and action, one where they are equal. `about` stands below
    the title, a line or two.
    """
    sides = list(dict.fromkeys(buckets["side"]))
    tall = [buckets.loc[buckets["side"] == side, "bucket"].nunique() for side in sides]
    with style.house_style():
        head = 0.3 + 0.13 * (1 + about.count("\n"))
        height = head + sum(_ROW * rows + _AROUND for rows in tall)
        figure = Figure(figsize=(style.PAGE, height))
        title = f"What lowering a bucket does, and the level it is given\n{about}"
        figure.text(0.01, 1 - 0.08 / height, title, ha="left", va="top", fontsize=8,
                    fontweight="bold")  # fmt: skip
        top = height - head
        for side, rows in zip(sides, tall, strict=True):
            own = buckets[buckets["side"] == side]
            _side_panels(figure, own, side, groups, top - 0.2, _ROW * rows)
            top -= _ROW * rows + _AROUND
        return style.save(figure, folder, stem)


def _side_panels(
    figure: Figure, own: pd.DataFrame, side: str, groups: tuple[int, ...], top: float, tall: float
) -> None:
    names = list(dict.fromkeys(own["bucket"]))
    panels = _panels(own, names, len(groups))
    width, height = figure.get_size_inches()
    each = (width - _NAMES - 0.08 - _PANEL_GAP * (len(panels) - 1)) / len(panels)
    for at, panel in enumerate(panels):
        left = _NAMES + at * (each + _PANEL_GAP)
        axes = figure.add_axes((left / width, (top - tall) / height, each / width, tall / height))
        _draw_panel(axes, panel, each / len(groups))
        axes.set_xticks(range(len(groups)), layer_names(groups), fontsize=5.5)
        axes.set_yticks(range(len(names)), names if at == 0 else [], fontsize=5.5)
    lines = f"{side} side, {len(names)} names"
    figure.text(0.06 / width, (top + 0.05) / height, lines, fontsize=7, va="bottom")


def _panels(own: pd.DataFrame, names: list[str], groups: int) -> list[Panel]:
    levels = sorted(set(own["level"]), key=level_named)
    shown = list(dict.fromkeys([levels[0], levels[-1]]))
    top = max(1.0, float(own["v_bar_pp"].max()))
    found: list[Panel] = []
    for level in shown:
        values = _table(own[own["level"] == level], names, groups, "v_bar_pp")
        texts = [[_points(value) for value in row] for row in values]
        found.append((f"V̄({level}), points", values, texts, mpl.colormaps["Oranges"], top))
    distortion = _table(own[own["level"] == levels[0]], names, groups, "distortion")
    positive = distortion[distortion > 0]
    lowest = float(np.log10(positive.min())) - 0.5 if positive.size else 0.0
    with np.errstate(divide="ignore"):
        logs = np.log10(distortion)
    texts = [[_log(value) for value in row] for row in logs]
    shifted = np.where(np.isneginf(logs), 0.0, logs - lowest)
    scale = max(float(np.nanmax(shifted)), 1e-9)
    found.append((f"log₁₀ D({levels[0]})", shifted, texts, mpl.colormaps["Blues"], scale))
    return [*found, _levels(own[own["level"] == levels[0]], names, groups)]


def _levels(own: pd.DataFrame, names: list[str], groups: int) -> Panel:
    values = np.full((len(names), groups), np.nan)
    texts = [[""] * groups for _ in names]
    for row in own.to_dict("records"):
        at = names.index(row["bucket"])
        values[at, row["group"]] = stored_bits(level_named(row["action"]))
        same = row["floor"] == row["action"]
        letters = row["action"] if same else f"{row['floor']}→{row['action']}"
        texts[at][row["group"]] = letters
    return "floor → action", values, texts, mpl.colormaps["Purples"], 20.0  # 16 bits: not black


def _table(own: pd.DataFrame, names: list[str], groups: int, column: str) -> NDArray[Any]:
    values = np.full((len(names), groups), np.nan)
    for name, group, value in zip(own["bucket"], own["group"], own[column], strict=True):
        values[names.index(name), group] = value
    return values


def _draw_panel(axes: Axes, panel: Panel, cell: float) -> None:
    title, values, texts, colors, top = panel
    # Both ends of these maps: from white, and no darker than black letters can be told on.
    shades = ["#ffffff", *(colors(x) for x in np.linspace(0.08, 0.85, 255))]
    ramp = ListedColormap(shades).with_extremes(bad=_NO_BUCKET)
    rows, columns = values.shape
    axes.pcolormesh(
        np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5, values, cmap=ramp, vmin=0,
        vmax=top, edgecolors=style.GRID, linewidth=0.4,
    )  # fmt: skip
    axes.invert_yaxis()
    axes.set_title(title, fontsize=6.5, pad=3)
    axes.tick_params(length=0, pad=2)
    if cell < _LEAST_CELL:
        return
    for y in range(rows):
        for x in range(columns):
            if not np.isnan(values[y, x]) and texts[y][x]:
                dark = _is_dark(ramp(min(values[y, x] / top, 1.0)))
                axes.text(x, y, texts[y][x], ha="center", va="center_baseline", fontsize=_TEXT,
                          color="#ffffff" if dark else style.INK)  # fmt: skip


def _is_dark(color: Any) -> bool:
    red, green, blue = to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.55


def _points(value: float) -> str:
    return "" if np.isnan(value) else "0" if value == 0 else rounded(value, 1)


def _log(value: float) -> str:
    return "" if np.isnan(value) else "D=0" if np.isneginf(value) else rounded(value, 1)
