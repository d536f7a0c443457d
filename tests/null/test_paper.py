"""The published numbers: what was copied is what was printed, and the counts behind it hold."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from pask.bfcl.data import CATEGORIES, SUBSETS
from pask.errors import PaskError
from pask.paths import CONFIGS
from pask.report.paper import (
    TEST_SIZES,
    column,
    count,
    is_papers_model,
    paper_accuracy,
    read_table,
)
from pask.report.statistics import rounded


@pytest.fixture(scope="module")
def paper() -> pd.DataFrame:
    return paper_accuracy()


def test_the_test_sizes_are_those_of_the_splits() -> None:
    assert [TEST_SIZES[c] for c in CATEGORIES] == [240, 120, 120, 120, 154, 633, 10, 14]
    assert sum(TEST_SIZES.values()) == 1411


def test_every_category_figure_is_one_count(paper: pd.DataFrame) -> None:
    cells = paper[paper["category"].isin(CATEGORIES)]
    assert len(cells) == 2 * 7 * 8 == 112
    for k, n, printed in zip(cells["k"], cells["n"], cells["accuracy_pct"], strict=True):
        assert rounded(100 * k / n, 2) == f"{printed:.2f}"


def test_the_28_overalls_recompute_to_the_printed_digit(paper: pd.DataFrame) -> None:
    printed = read_table(1)
    checked = 0
    for row in printed.to_dict("records"):
        for subset, members in SUBSETS.items():
            k = sum(count(row[column(c)], TEST_SIZES[c]) for c in members)
            n = sum(TEST_SIZES[c] for c in members)
            assert rounded(100 * k / n, 2) == row[f"{subset}_overall"]
            checked += 1
    assert checked == 28
    assert len(paper) == 112 + 28


@pytest.mark.parametrize(
    ("model", "method", "counts"),
    [
        ("Qwen3-4B", "full", [228, 114, 108, 101, 121, 472, 6, 11]),
        ("Qwen3-4B", "pask", [221, 112, 97, 98, 114, 457, 6, 7]),
        ("Qwen3-4B", "transattn", [213, 77, 65, 52, 70, 174, 0, 0]),
        ("Qwen3-14B", "rocketkv", [188, 108, 36, 50, 85, 349, 3, 6]),
        ("Qwen3-14B", "triaxialkv", [211, 95, 93, 77, 105, 387, 3, 0]),
        ("Qwen3-14B", "h2o", [173, 102, 27, 20, 84, 328, 0, 0]),
    ],
)
def test_counts_by_hand(paper: pd.DataFrame, model: str, method: str, counts: list[int]) -> None:
    rows = paper[(paper["model"] == model) & (paper["method"] == method)].set_index("category")
    assert [rows.loc[c, "k"] for c in CATEGORIES] == counts
    assert rows.loc["nonlive_overall", "k"] == sum(counts[:4])
    assert rows.loc["live_overall", "k"] == sum(counts[4:])


def test_methods_carry_registered_names(paper: pd.DataFrame) -> None:
    names = ["full", "h2o", "snapkv", "rocketkv", "triaxialkv", "transattn", "pask"]
    assert list(paper["method"].unique()) == names


def test_a_figure_that_no_count_prints_is_refused() -> None:
    assert count("0.00", 10) == 0
    with pytest.raises(PaskError, match=r"95\.01 % of 240 is the rounding of 0 counts"):
        count("95.01", 240)


def test_a_wrong_overall_is_refused(tmp_path: Path) -> None:
    text = (CONFIGS / "paper" / "table1.csv").read_text(encoding="utf-8")
    (tmp_path / "table1.csv").write_text(text.replace("91.83", "91.84"), encoding="utf-8")
    with pytest.raises(PaskError, match=r"nonlive_overall is printed as 91.84.*551/600"):
        paper_accuracy(tmp_path)


def test_a_missing_table_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(PaskError, match=r"table1\.csv: the paper's published numbers are missing"):
        paper_accuracy(tmp_path)


def test_memory_savings_recompute() -> None:
    table = read_table(2)
    full = {row.gpu: int(row.peak_mib) for row in table.itertuples() if row.method == "Full KV"}
    savings = [
        rounded(100 * (1 - int(row.peak_mib) / full[row.gpu]), 2)
        for row in table.itertuples()
        if row.method != "Full KV"
    ]
    assert savings == ["38.78", "47.47", "38.83", "47.48"]
    assert list(table.loc[table["saving_pct"] != "", "saving_pct"]) == savings


def test_ablation_accuracies_are_counts_of_600() -> None:
    assert [count(printed, 600) for printed in read_table(4)["test_acc_pct"]] == [
        551, 526, 527, 542,
    ]  # fmt: skip
    assert [count(printed, 200) for printed in read_table(5)["dev_acc_pct"]] == [171, 171, 172]


def test_serving_table_is_complete() -> None:
    table = read_table(3)
    assert len(table) == 15
    assert (table.drop(columns="method").map(float) > 0).all(axis=None)


@pytest.mark.parametrize(
    ("model", "same"),
    [
        ("Qwen/Qwen3-4B-Instruct-2507", True),
        ("qwen3-4b-instruct-2507", True),
        ("Qwen/Qwen3-4B", False),  # the paper's short name, but another checkpoint
        ("SmolLM2-135M-Instruct", False),
    ],
)
def test_which_model_is_the_papers(model: str, same: bool) -> None:
    assert is_papers_model(model, "Qwen3-4B") is same
