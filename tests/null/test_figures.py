"""The accuracy figure: what it marks, and that equal frames give equal files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest
from long_fixture import long_rows, paper_counts

from pask.config import Entry
from pask.report.figures import accuracy_figure
from pask.report.long import entries_of
from pask.report.paper import TEST_SIZES, paper_accuracy
from pask.report.tables import accuracy_table

STYLES = {"full": ("#7f7f7f", "o"), "snapkv": ("#0072b2", "s")}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    paper = paper_accuracy()
    long = pd.concat(
        [
            long_rows("full", paper_counts(paper, "full"), budget=1.0, model="a_$model$"),
            long_rows("snapkv", paper_counts(paper, "snapkv"), budget=0.33, reached=0.4,
                      model="a_$model$"),
        ]
    )  # fmt: skip
    entries = [*entries_of(long), Entry("h2o@0.33", "h2o", 0.33, {})]
    return accuracy_table(long, paper, TEST_SIZES, entries=entries, labels={"h2o": "H2O"},
                          smoke="tiny random model")  # fmt: skip


@pytest.fixture(scope="module")
def files(frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("figures")
    return {path.suffix: path for path in accuracy_figure(frame, folder, STYLES)}


def test_three_formats_are_written_whole(files: dict[str, Path]) -> None:
    assert files[".png"].read_bytes().startswith(b"\x89PNG")
    assert files[".pdf"].read_bytes().startswith(b"%PDF")
    assert files[".svg"].read_text(encoding="utf-8").endswith("</svg>\n")
    assert len(list(files[".png"].parent.iterdir())) == 3


def test_equal_frames_give_equal_bytes(
    frame: pd.DataFrame, files: dict[str, Path], tmp_path: Path
) -> None:
    with mpl.rc_context({"font.size": 30, "xtick.major.size": 20}):  # a user's own matplotlibrc
        again = accuracy_figure(frame.copy(), tmp_path, STYLES)
        assert mpl.rcParams["font.size"] == 30
    for path in again:
        ours, theirs = (hashlib.sha256(p.read_bytes()).digest() for p in (path, files[path.suffix]))
        assert ours == theirs, path.suffix


def test_the_figure_says_what_it_shows(files: dict[str, Path]) -> None:
    svg = files[".svg"].read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    shown = " ".join(texts)
    expected = (
        "Non-live (n = 600)",
        "Live (n = 811)",
        "Full KV",
        "SnapKV",
        "target 0.33",
        "H2O",
        "551/600",
        "461/811",
        "off budget: 0.4",
        "a_$model$",
        "Tiny random model: a smoke figure, not evidence.",
        "hollow: the paper",
    )
    for part in expected:
        assert part in shown, part
    assert shown.count("not run") == 2


def test_variants_have_two_lines_each(tmp_path: Path) -> None:
    """More would run into the next entry's."""
    right = paper_counts(paper_accuracy(), "snapkv")
    plain, other = (long_rows("snapkv", right, budget=0.33) for _ in range(2))
    other["entry"] = "snapkv-other@0.33"
    long = pd.concat([plain, other])
    frame = accuracy_table(long, paper_accuracy(), TEST_SIZES)
    (svg,) = (p for p in accuracy_figure(frame, tmp_path, STYLES) if p.suffix == ".svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))
    assert texts.count("SnapKV") == 2
    assert {"snapkv@0.33", "snapkv-other@0.33"} <= set(texts)
    assert "target 0.33" not in texts


def test_colours_come_from_the_styles(files: dict[str, Path]) -> None:
    svg = files[".svg"].read_text(encoding="utf-8")
    assert "#0072b2" in svg
    assert "#7f7f7f" in svg


def test_files_carry_no_date_and_no_type_3_font(files: dict[str, Path]) -> None:
    assert b"/CreationDate" not in files[".pdf"].read_bytes()
    assert b"/Type3" not in files[".pdf"].read_bytes()
    assert "dc:date" not in files[".svg"].read_text(encoding="utf-8")
