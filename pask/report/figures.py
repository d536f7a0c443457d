"""The figures, drawn from the tables' frames and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pask.bfcl.data import SUBSETS
from pask.report import style
from pask.report.blocks import SUBSET_NAMES, entry_names, smoke_line
from pask.report.tables import REFERENCE

Styles = Mapping[str, tuple[str, str]]  # method name -> its registered colour and marker


def accuracy_figure(
    frame: pd.DataFrame, folder: Path, styles: Styles, stem: str = "accuracy"
) -> list[Path]:
    """How much accuracy does each entry keep? Dots with 95 % Wilson bars, one panel a subset.

    `frame` is an `accuracy_table`; its overalls are drawn, one line an entry in the frame's order.
    Full KV is the grey line down the panel, the paper's figure the hollow mark below ours. Writes
    <stem>.png, .svg and .pdf, byte for byte the same for the same frame.
    """
    subsets = [s for s in SUBSETS if (frame["category"] == f"{s}_overall").any()]
    entries = list(frame["entry"].unique())
    with style.house_style():
        figure = Figure(figsize=(style.PAGE, 1.25 + 0.34 * len(entries)), layout="constrained")
        panels = figure.subplots(1, len(subsets), sharey=True, squeeze=False)[0]
        for axes, subset in zip(panels, subsets, strict=True):
            rows = frame[frame["category"] == f"{subset}_overall"]
            _panel(axes, rows, styles)
            n = int(rows["n"].iloc[0])
            axes.set_title(f"{SUBSET_NAMES[subset]} (n = {n:,})")
        names = entry_names(frame)
        # Two lines have room: an entry's own name, where it is given, says its target too.
        labels = ["\n".join((names[e][0], *names[e][1:][-1:])) for e in entries]
        panels[0].set_yticks(range(len(entries)), labels)
        panels[0].set_ylim(len(entries) - 0.4, -0.6)
        title = "\n".join(("BFCL accuracy by method and byte budget, %", smoke_line(frame)))
        figure.suptitle(title.strip(), x=0.01, ha="left", fontsize=8.5, fontweight="bold")
        figure.supxlabel(_caption(frame), x=0.01, ha="left", fontsize=7, color=style.SOFT)
        return style.save(figure, folder, stem)


def _panel(axes: Axes, rows: pd.DataFrame, styles: Styles) -> None:
    axes.set_xlim(0, 100)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for y, row in enumerate(rows.to_dict("records")):
        color, marker = styles.get(row["method"], (style.INK, "o"))
        if row["method"] == REFERENCE and not pd.isna(row["k"]):
            axes.axvline(row["accuracy_pct"], color=style.REFERENCE, linewidth=1, zorder=1.5)
        if not pd.isna(row["paper_k"]):
            axes.plot(
                row["paper_accuracy_pct"], y + 0.24, marker, color=color,
                markerfacecolor="white", markersize=4.5, markeredgewidth=0.9, zorder=3,
            )  # fmt: skip
        if pd.isna(row["k"]):
            axes.text(1, y, row["flag"], color=style.SOFT, fontsize=7, va="center")
            continue
        axes.plot(
            (row["ci_low"], row["ci_high"]), (y, y), color=color, linewidth=1.6,
            solid_capstyle="butt", zorder=2,
        )  # fmt: skip
        axes.plot(row["accuracy_pct"], y, marker, color=color, markersize=6,
                  zorder=4)  # fmt: skip
        _count(axes, y, row)


def _count(axes: Axes, y: int, row: Mapping[Any, Any]) -> None:
    """k/n in the margin right of the panel, the off-budget flag under it."""
    text = f"{row['k']}/{row['n']}" + (f"\n{row['flag']}" if row["flag"] else "")
    axes.text(1.03, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=6.5,
              color=style.SOFT)  # fmt: skip


def _caption(frame: pd.DataFrame) -> str:
    one = frame.iloc[0]
    parts = [f"{one['model']}, split {one['split']}; bars: 95 % Wilson intervals",
             "grey line: Full KV"]  # fmt: skip
    if frame["paper_k"].notna().any():
        parts.append(f"hollow: the paper, {one['paper_model']}")
    return "; ".join(parts)
