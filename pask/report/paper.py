"""The paper's published accuracies, with the integer counts behind them.

Table 1 prints percentages only. With the test sizes below every one of its 112 category figures is
the half-up rounding of exactly one count, and the counts give all 28 overalls to the printed digit.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from pask.bfcl.data import CATEGORIES, SUBSETS
from pask.errors import PaskError
from pask.paths import CONFIGS
from pask.report.statistics import rounded

BUDGET = 0.33  # the paper's total KV budget for every compressed method of Table 1

TEST_SIZES: dict[str, int] = dict(
    zip(CATEGORIES, (240, 120, 120, 120, 154, 633, 10, 14), strict=True)
)

# The paper's short names and the checkpoints behind them (section 4.1).
CHECKPOINTS = {"Qwen3-4B": "Qwen3-4B-Instruct-2507", "Qwen3-14B": "Qwen3-14B"}


def column(category: str) -> str:
    """Table 1's column for one of BFCL's categories or one of the two overalls."""
    if category in SUBSETS["nonlive"]:
        return "nonlive_" + category.removesuffix("_python")
    return category


def read_table(number: int, folder: Path | None = None) -> pd.DataFrame:
    """The paper's table `number` (1 to 5), every cell as the text that was printed.

    `folder` None is the project's `configs/paper`. Raises PaskError where the file is missing.
    """
    path = (folder or CONFIGS / "paper") / f"table{number}.csv"
    if not path.is_file():
        raise PaskError(
            "the paper's published numbers are missing",
            where=str(path),
            todo="run from a checkout that has configs/paper",
        )
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def count(printed: str, n: int) -> int:
    """The only k whose percentage of n, rounded half up, reads `printed`.

    Raises PaskError where no count, or more than one, would print so.
    """
    digits = len(printed.partition(".")[2])
    fits = [k for k in range(n + 1) if rounded(100 * k / n, digits) == printed]
    if len(fits) != 1:
        raise PaskError(f"{printed} % of {n} is the rounding of {len(fits)} counts, not of one")
    return fits[0]


def method_name(label: str) -> str:
    """The registered name of a method as the paper labels it, e.g. "Full KV" is `full`."""
    return label.removesuffix(" KV").lower()


def is_papers_model(model: str, paper_model: str) -> bool:
    """Whether `model` (hub id or name) is the checkpoint that the paper calls `paper_model`."""
    return model.rpartition("/")[2].lower() == CHECKPOINTS[paper_model].lower()


def paper_accuracy(folder: Path | None = None) -> pd.DataFrame:
    """Table 1 in long form: model, method, category, n, k, accuracy_pct (as printed).

    One row a model, method and category, the two overalls among the categories. An overall's k is
    the sum of its categories' counts. Raises PaskError where a printed figure and the counts
    disagree.
    """
    records = []
    for row in read_table(1, folder).to_dict("records"):
        counts: dict[str, int] = {}
        sizes = dict(TEST_SIZES)
        for subset, members in SUBSETS.items():
            overall = f"{subset}_overall"
            counts |= {c: count(row[column(c)], TEST_SIZES[c]) for c in members}
            counts[overall] = sum(counts[c] for c in members)
            sizes[overall] = sum(TEST_SIZES[c] for c in members)
            if rounded(100 * counts[overall] / sizes[overall], 2) != row[overall]:
                raise PaskError(
                    f"{row['model']}, {row['method']}: {overall} is printed as {row[overall]}, "
                    f"its counts give {counts[overall]}/{sizes[overall]}",
                    where="configs/paper/table1.csv",
                )
        records += [
            {
                "model": row["model"],
                "method": method_name(row["method"]),
                "category": category,
                "n": sizes[category],
                "k": counts[category],
                "accuracy_pct": float(row[column(category)]),
            }
            for category in counts
        ]
    return pd.DataFrame(records)
