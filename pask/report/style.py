"""How every figure looks and is saved: one set of rcParams, three formats, the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import matplotlib as mpl
import seaborn
from matplotlib.figure import Figure

from pask.files import whole_file

COLUMN, PAGE = 3.25, 6.75  # inches: one column and the full width of a two-column paper
INK, SOFT, GRID, REFERENCE = "#1b1b1f", "#6a6a73", "#e4e4e8", "#7f7f7f"

_RC: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same letters on any machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.color": SOFT,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a "$" in a model's name is a dollar sign
    "figure.facecolor": "white",
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # TrueType: journals refuse Type 3
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pask",  # ids depend on the content alone
}

_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save inside this block: the project's rcParams, whatever a user's matplotlibrc."""
    with mpl.rc_context():
        mpl.rcdefaults()
        seaborn.set_theme(style="ticks", rc=_RC)
        yield


def save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    """Write <stem>.png, .svg and .pdf, each whole or not at all; the paths written."""
    paths = []
    for kind, metadata in _METADATA.items():
        path = folder / f"{stem}.{kind}"
        with whole_file(path) as out:
            raw = cast(IO[bytes], out.buffer)  # type: ignore[attr-defined]
            figure.savefig(raw, format=kind, metadata=metadata)
        paths.append(path)
    return paths
