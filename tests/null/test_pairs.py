"""Methods of one target against each other: the pairs, and the squares that show them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from long_fixture import long_rows

from pask.report.pairs import pair_blocks, pair_notes, pair_table
from pask.report.paper import TEST_SIZES, paper_accuracy
from pask.report.render import write_pairs
from pask.report.statistics import holm
from pask.report.tables import accuracy_table

SIZES = {"simple_python": 12, "parallel": 6, "live_simple": 9}
LIVE = {"live_simple": 5}


def entry(
    method: str, budget: float, simple: int, *, rotate: int = 0, **more: float
) -> pd.DataFrame:
    right = {"simple_python": simple, "parallel": 3} | LIVE
    return long_rows(method, right, budget=budget, sizes=SIZES, rotate=rotate, **more)  # type: ignore[arg-type]


def accuracy(long: pd.DataFrame) -> pd.DataFrame:
    return accuracy_table(long, paper_accuracy(), SIZES, split_sizes=TEST_SIZES)


@pytest.fixture(scope="module")
def long() -> pd.DataFrame:
    """Of the simple rows pask has 0 to 8, snapkv at 0.20 has 0 to 3 and other 10, 11, 0 and 1."""
    return pd.concat(
        [
            entry("full", 1.0, 12),
            entry("pask", 0.20, 9),
            entry("pask", 0.33, 12),
            entry("snapkv", 0.33, 12, reached=0.4),
            entry("snapkv", 0.20, 4),
            entry("other", 0.20, 4, rotate=2),
            entry("other", 0.15, 4),
        ],
        ignore_index=True,
    )


@pytest.fixture(scope="module")
def pairs(long: pd.DataFrame) -> pd.DataFrame:
    return pair_table(long, accuracy(long))


def pair(pairs: pd.DataFrame, one: str, other: str, subset: str = "nonlive") -> pd.Series:
    found = pairs[(pairs["entry"] == one) & (pairs["other"] == other) & (pairs["subset"] == subset)]
    assert len(found) == 1
    return found.iloc[0]


def test_every_two_of_one_target_meet_once_a_subset(pairs: pd.DataFrame) -> None:
    met = [("pask@0.20", "snapkv@0.20"), ("pask@0.20", "other@0.20")]
    met += [("snapkv@0.20", "other@0.20"), ("pask@0.33", "snapkv@0.33")]
    for subset in ("nonlive", "live"):
        of_subset = pairs[pairs["subset"] == subset]
        assert list(zip(of_subset["entry"], of_subset["other"], strict=True)) == met
    assert "full" not in set(pairs["entry"]) | set(pairs["other"])  # nor one that is alone: 0.15


def test_a_pair_by_hand(pairs: pd.DataFrame) -> None:
    one = pair(pairs, "pask@0.20", "snapkv@0.20")
    assert (one["n"], one["only_entry"], one["only_other"], one["clusters"]) == (18, 5, 0, 6)
    assert one["diff_pp"] == pytest.approx(100 * 5 / 18)
    assert one["mcnemar_p"] == 2 / 2**5
    assert one["diff_low"] <= one["diff_pp"] <= one["diff_high"]
    # Rotated by 2: simple rows 0, 1, 10 and 11 are right, of parallel 0, 4 and 5 where the others
    # have 0, 1 and 2.
    other = pair(pairs, "pask@0.20", "other@0.20")
    assert (other["only_entry"], other["only_other"]) == (7 + 2, 2 + 2)
    assert other["diff_pp"] == pytest.approx(100 * 5 / 18)
    same = pair(pairs, "pask@0.33", "snapkv@0.33")
    assert (same["only_entry"], same["only_other"], same["mcnemar_p"]) == (0, 0, 1)
    assert (same["diff_low"], same["diff_high"]) == (0, 0)
    assert (same["b_persist"], same["other_b_persist"]) == (pytest.approx(0.33), pytest.approx(0.4))


def test_holm_is_over_a_square(pairs: pd.DataFrame) -> None:
    for _, square in pairs.groupby(["subset", "budget"]):
        assert list(square["holm_p"]) == holm(square["mcnemar_p"].tolist())
    assert pair(pairs, "pask@0.20", "snapkv@0.20")["holm_p"] == 3 * 2 / 2**5
    assert pair(pairs, "pask@0.33", "snapkv@0.33")["holm_p"] == 1


def test_a_square_reads_the_same_from_both_sides(long: pd.DataFrame, pairs: pd.DataFrame) -> None:
    blocks = pair_blocks(pairs, accuracy(long))
    assert [block.title for block in blocks] == [
        "Non-live, target 0.20, n = 18",
        "Non-live, target 0.33, n = 18",
        "Live, target 0.20, n = 9",
        "Live, target 0.33, n = 9",
    ]
    square = blocks[0]
    assert square.header[2:] == (("PASK",), ("SnapKV",), ("Other & Sons_1",))
    assert [line.cells[0][0] for line in square.lines] == [cell[0] for cell in square.header[2:]]
    pask, snapkv, _ = (line.cells[2:] for line in square.lines)
    assert pask[0] == snapkv[1] == ("",)
    assert pask[1][0] == "+27.78"
    assert snapkv[0][0] == "−27.78"
    assert pask[1][2] == "5 : 0, p 0.188"
    assert snapkv[0][2] == "0 : 5, p 0.188"
    low, high = pask[1][1].split(" to ")
    flipped = {"+": "−", "−": "+"}
    assert snapkv[0][1] == " to ".join(flipped.get(end[0], end[0]) + end[1:] for end in (high, low))


def test_what_is_off_its_budget_is_told(long: pd.DataFrame, pairs: pd.DataFrame) -> None:
    square = pair_blocks(pairs, accuracy(long))[1]
    assert [line.cells[1] for line in square.lines] == [("0.330",), ("0.400", "off budget: 0.4")]


def test_variants_are_told_apart() -> None:
    plain, other = entry("pask", 0.20, 9), entry("pask", 0.20, 8)
    other["entry"] = "pask-other@0.20"
    both = pd.concat([plain, other], ignore_index=True)
    (square, _) = pair_blocks(pair_table(both, accuracy(both)), accuracy(both))
    assert square.header[2:] == (("PASK", "pask@0.20"), ("PASK", "pask-other@0.20"))


def test_written_in_four_forms(long: pd.DataFrame, pairs: pd.DataFrame, tmp_path: Path) -> None:
    paths = write_pairs(pairs, accuracy(long), tmp_path, title="In pairs")
    assert [path.name for path in paths] == [
        f"pairs.{form}" for form in ("csv", "md", "tex", "html")
    ]
    read = pd.read_csv(paths[0])
    assert len(read) == len(pairs)
    assert read["other_b_persist"].tolist() == pytest.approx(pairs["other_b_persist"].tolist())
    text = paths[1].read_text()
    assert "**Non-live, target 0.20, n = 18**" in text
    assert "a smoke figure, not evidence" in text
    assert "+27.78<br>" in text
    assert "Squares of fewer than 30 rows cannot rank methods." in text


def test_without_two_of_one_target_the_page_says_so(tmp_path: Path) -> None:
    alone = pd.concat([entry("full", 1.0, 12), entry("pask", 0.33, 12)], ignore_index=True)
    frame = accuracy(alone)
    pairs = pair_table(alone, frame)
    assert pairs.empty
    assert pair_blocks(pairs, frame) == []
    (note,) = pair_notes(pairs)
    assert "nothing to compare" in note
    paths = write_pairs(pairs, frame, tmp_path)
    assert paths[0].read_text().startswith("model,split,subset,budget,entry,other,")
    assert all(note in path.read_text() for path in paths[1:])
