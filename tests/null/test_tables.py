"""The accuracy and error tables, and the four ways they are printed."""

from __future__ import annotations

import hashlib
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from long_fixture import long_rows, paper_counts

from pask.config import Entry
from pask.errors import HarnessFault, PaskError
from pask.report.blocks import accuracy_blocks, accuracy_notes, smoke_line
from pask.report.long import entries_of, read_long
from pask.report.paper import TEST_SIZES, paper_accuracy
from pask.report.render import write_errors, write_tables
from pask.report.tables import accuracy_table, error_table

PAPER = paper_accuracy()
NOT_RUN = Entry("h2o@0.33", "h2o", 0.33, {})
SMALL = dict.fromkeys(TEST_SIZES, 4)


def whole_run(model: str = "tiny-model") -> pd.DataFrame:
    """The paper's own counts as a run of ours, SnapKV at 0.20 being off its budget."""

    def rows(method: str, like: str, **more: float) -> pd.DataFrame:
        return long_rows(method, paper_counts(PAPER, like), model=model, **more)  # type: ignore[arg-type]

    return pd.concat(
        [
            rows("full", "full", budget=1.0),
            rows("snapkv", "snapkv", budget=0.33, clamped=2),
            rows("snapkv", "h2o", budget=0.20, reached=0.41),
            rows("pask", "pask", budget=0.33, rotate=3),
        ],
        ignore_index=True,
    )


@pytest.fixture(scope="module")
def long() -> pd.DataFrame:
    return whole_run()


@pytest.fixture(scope="module")
def frame(long: pd.DataFrame) -> pd.DataFrame:
    entries = [*entries_of(long), NOT_RUN]
    return accuracy_table(long, PAPER, TEST_SIZES, entries=entries, labels={"h2o": "H2O"})


def small_run(**right: int) -> pd.DataFrame:
    """Four rows a category; `full=3` gets three of them right."""
    budgets = {"full": 1.0, "snapkv": 0.33}
    return pd.concat(
        [
            long_rows(name, dict.fromkeys(SMALL, k), budget=budgets[name], sizes=SMALL)
            for name, k in right.items()
        ],
        ignore_index=True,
    )


def row(frame: pd.DataFrame, entry: str, category: str) -> pd.Series:
    found = frame[(frame["entry"] == entry) & (frame["category"] == category)]
    assert len(found) == 1
    return found.iloc[0]


def test_ten_rows_an_entry_in_the_configs_order(frame: pd.DataFrame) -> None:
    order = ["full", "snapkv@0.33", "snapkv@0.20", "pask@0.33", "h2o@0.33"]
    assert list(frame["entry"]) == [entry for entry in order for _ in range(10)]
    assert list(frame["category"][:10]) == [
        "simple_python", "multiple", "parallel", "parallel_multiple", "nonlive_overall",
        "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_overall",
    ]  # fmt: skip


def test_a_cell_holds_its_count_and_wilson_interval(frame: pd.DataFrame) -> None:
    cell = row(frame, "pask@0.33", "parallel")
    assert (cell["k"], cell["n"]) == (97, 120)
    assert cell["accuracy_pct"] == pytest.approx(97 / 1.2)
    assert (cell["ci_low"], cell["ci_high"]) == pytest.approx((72.9, 86.9), abs=0.05)


def test_overalls_sum_counts_over_categories(frame: pd.DataFrame) -> None:
    assert row(frame, "full", "nonlive_overall")["k"] == 551
    live = row(frame, "pask@0.33", "live_overall")
    assert (live["k"], live["n"]) == (584, 811)


def test_byte_shares_are_ratios_of_sums() -> None:
    # Two prompts of unequal size: the mean of their shares would be 0.55, the ratio of sums 0.19.
    table = small_run(full=4, snapkv=4)
    mine = (table["entry"] == "snapkv@0.33") & (table["category"] == "parallel")
    table.loc[mine, "full_bytes"] = [100, 100, 900, 900]
    table.loc[mine, "full_prompt_bytes"] = [80, 80, 800, 800]
    table.loc[mine, "resident_prompt_bytes"] = [80, 80, 72, 72]
    table.loc[mine, "resident_decode_bytes"] = [20, 20, 18, 18]
    table.loc[mine, "resident_byte_steps"] = [10, 10, 20, 20]
    table.loc[mine, "read_byte_steps"] = [1, 4, 2, 3]
    table.loc[mine, "full_byte_steps"] = [10, 10, 90, 90]
    cell = row(accuracy_table(table, PAPER, SMALL), "snapkv@0.33", "parallel")
    assert cell["b_persist"] == pytest.approx(380 / 2000)
    assert cell["b_prompt"] == pytest.approx(304 / 1760)
    assert cell["b_decode"] == pytest.approx(76 / 240)
    assert cell["b_avg"] == pytest.approx(60 / 200)
    assert cell["b_read"] == pytest.approx(10 / 200)
    assert cell["flag"] == "off budget: 0.19"


@pytest.mark.parametrize(("reached", "flag"), [(0.333, ""), (0.327, ""), (0.335, "0.336"),
                                               (0.3, "0.3")])  # fmt: skip
def test_more_than_one_percent_off_target_is_flagged(reached: float, flag: str) -> None:
    table = pd.concat(
        [
            small_run(full=3),
            long_rows("snapkv", SMALL, budget=0.33, reached=reached, sizes=SMALL),
        ]
    )
    found = accuracy_table(table, PAPER, SMALL).set_index("entry").loc["snapkv@0.33", "flag"]
    assert set(found) == {f"off budget: {flag}" if flag else ""}


def test_full_kv_is_always_on_budget_and_never_compared_with_itself(frame: pd.DataFrame) -> None:
    full = frame[frame["entry"] == "full"]
    assert set(full["b_persist"]) == {1.0}
    assert set(full["flag"]) == {""}
    assert full["diff_vs_full_pp"].isna().all()


def test_pairing_with_full_kv(frame: pd.DataFrame) -> None:
    overall = row(frame, "pask@0.33", "nonlive_overall")
    # Rotated by 3, each category loses or gains at both ends of its run of right answers.
    assert overall["lost"] - overall["gained"] == 551 - 528
    assert (overall["lost"], overall["gained"]) == (35, 12)
    assert overall["flips"] == 47
    assert overall["diff_vs_full_pp"] == pytest.approx(-100 * 23 / 600)
    assert overall["diff_low"] < overall["diff_vs_full_pp"] < overall["diff_high"]
    assert overall["clusters"] == 200
    assert overall["mcnemar_p"] == pytest.approx(0.0010885, rel=1e-3)
    cell = row(frame, "pask@0.33", "parallel")
    assert cell["flips"] == cell["lost"] + cell["gained"]
    assert pd.isna(cell["mcnemar_p"])


def test_holm_covers_all_comparisons_of_the_table(frame: pd.DataFrame) -> None:
    tested = frame[frame["mcnemar_p"].notna()]
    assert len(tested) == 6
    assert (tested["holm_p"] >= tested["mcnemar_p"]).all()
    largest = tested["mcnemar_p"].idxmax()
    assert tested.loc[largest, "holm_p"] == tested.loc[largest, "mcnemar_p"]
    smallest = tested["mcnemar_p"].idxmin()
    assert tested.loc[smallest, "holm_p"] == pytest.approx(6 * tested.loc[smallest, "mcnemar_p"])


def test_the_bytes_block_tells_the_development_figure_and_what_is_read() -> None:
    table = accuracy_table(small_run(full=4, snapkv=4), PAPER, SMALL)
    block = accuracy_blocks(table)[-1]
    columns = [text for (text,) in block.header]
    assert columns[2:8] == ["knob", "development", "B_persist", "B_avg", "B_read", "prompt"]
    rows = {line.cells[0][0]: [cell[0] for cell in line.cells[2:7]] for line in block.lines}
    # round(900 * 0.33) + round(100 * 0.33) of 1,000; round(9500 * 0.33) and half of it of 9,500
    assert rows["SnapKV"] == ["0.3300", "0.3333", "0.3300", "0.3300", "0.1651"]
    assert rows["Full KV"] == ["–", "–", "1.0000", "1.0000", "1.0000"]
    # The development rows' figure flags nothing: the target is 0.33, and 0.33 was reached here.
    assert set(table["flag"]) == {""}


def test_without_full_kv_there_is_no_difference() -> None:
    table = accuracy_table(small_run(snapkv=2), PAPER, SMALL)
    assert table[["flips", "diff_vs_full_pp", "mcnemar_p"]].isna().all(axis=None)
    assert [block.title for block in accuracy_blocks(table)][2].startswith("Bytes")


def test_paper_figures_stand_beside_full_and_its_own_budget_only(frame: pd.DataFrame) -> None:
    assert row(frame, "snapkv@0.33", "live_overall")["paper_k"] == 461
    assert row(frame, "full", "multiple")["paper_accuracy_pct"] == 95.0
    assert row(frame, "h2o@0.33", "nonlive_overall")["paper_n"] == 600
    assert pd.isna(row(frame, "snapkv@0.20", "nonlive_overall")["paper_k"])


def test_verdict_only_for_the_papers_model_on_the_whole_split_and_on_budget() -> None:
    rows = whole_run("Qwen/Qwen3-4B-Instruct-2507")
    table = accuracy_table(rows, PAPER, TEST_SIZES)
    assert set(table.loc[table["entry"] == "pask@0.33", "verdict"]) == {"inside our interval"}
    assert set(table.loc[table["entry"] == "snapkv@0.20", "verdict"]) == {""}
    other = accuracy_table(rows, PAPER, TEST_SIZES, paper_model="Qwen3-14B")
    assert set(other["verdict"]) == {""}
    worse = rows.assign(correct=rows["correct"].where(rows["entry"] != "pask@0.33", 0),
                        error_type="x")  # fmt: skip
    found = accuracy_table(worse, PAPER, TEST_SIZES)
    assert row(found, "pask@0.33", "simple_python")["verdict"] == "outside our interval"
    few = small_run(full=4).assign(model="Qwen/Qwen3-4B-Instruct-2507")
    sample = accuracy_table(few, PAPER, SMALL)
    assert set(sample["verdict"]) == {""}


def test_an_entry_without_rows_is_not_run_and_never_zero(frame: pd.DataFrame) -> None:
    missing = frame[frame["entry"] == "h2o@0.33"]
    assert set(missing["flag"]) == {"not run"}
    assert missing[["k", "accuracy_pct", "ci_low", "b_persist"]].isna().all(axis=None)
    assert set(missing["label"]) == {"H2O"}


def test_no_gap_is_printed_as_a_number(frame: pd.DataFrame, tmp_path: Path) -> None:
    for path in write_tables(frame, tmp_path):
        text = path.read_text(encoding="utf-8")
        assert "<NA>" not in text, path.name
        assert "nan" not in text.lower(), path.name
    pairing, bytes_reached = accuracy_blocks(frame)[2:]
    assert len(pairing.lines) == 3 * 2  # three compressed entries that ran, two subsets
    assert len(bytes_reached.lines) == 4 * 2


def test_an_incomplete_entry_stops_the_table(long: pd.DataFrame) -> None:
    gap = (long["entry"] == "pask@0.33") & (long["id"] == "parallel_7")
    with pytest.raises(HarnessFault, match=r"pask@0\.33: parallel is not complete: 119 of 120"):
        accuracy_table(long[~gap], PAPER, TEST_SIZES)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("id", "multiple_0", "the same id twice"),
        ("category", "irrelevance", "rows outside the split; irrelevance"),
        ("entry", "new@0.5", "entries not in the config; new@0.5"),
        ("correct", 2, "neither 0 nor 1"),
        ("full_bytes", float("nan"), "a number is missing; multiple_1"),
        ("read_byte_steps", float("nan"), "a number is missing; multiple_1"),
        ("model", "another", "several models"),
        ("cluster", "elsewhere", "other items than the first entry's; multiple_1"),
    ],
)
def test_inconsistent_rows_are_harness_faults(column: str, value: object, message: str) -> None:
    table = small_run(full=3, snapkv=2).astype({"full_bytes": float, "read_byte_steps": float})
    entries = entries_of(table)
    target = (table["entry"] == "snapkv@0.33") & (table["id"] == "multiple_1")
    table.loc[target, column] = value
    with pytest.raises(HarnessFault, match=message):
        accuracy_table(table, PAPER, SMALL, entries=entries)


def test_a_wrong_answer_needs_an_error_type() -> None:
    table = small_run(full=3).assign(error_type="")
    with pytest.raises(HarnessFault, match="wrong, but without an error type"):
        accuracy_table(table, PAPER, SMALL)


def test_unknown_paper_model_is_bad_input(long: pd.DataFrame) -> None:
    with pytest.raises(PaskError, match="known: Qwen3-4B, Qwen3-14B"):
        accuracy_table(long, PAPER, TEST_SIZES, paper_model="Qwen3-8B")


def test_categories_left_out_of_a_sample_have_no_rows() -> None:
    sizes = {"simple_python": 4, "parallel": 4, "live_simple": 0}
    table = long_rows("full", {"simple_python": 3, "parallel": 1, "live_simple": 0}, budget=1.0,
                      sizes=sizes)  # fmt: skip
    found = accuracy_table(table, PAPER, sizes)
    assert list(found["category"]) == ["simple_python", "parallel", "nonlive_overall"]
    assert found["k"].iloc[-1] == 4
    assert found["n"].iloc[-1] == 8


def test_a_sample_says_so_everywhere(tmp_path: Path, frame: pd.DataFrame) -> None:
    sample = accuracy_table(small_run(full=3, snapkv=2), PAPER, SMALL, smoke="tiny random model")
    said = "Tiny random model, sample of 32 of 1,411 test rows: a smoke figure, not evidence."
    assert smoke_line(sample) == said
    for path in write_tables(sample, tmp_path):
        assert "sample of 32 of 1,411 test rows" in path.read_text(encoding="utf-8"), path.name
    assert smoke_line(frame) == ""
    assert not any("smoke" in note for note in accuracy_notes(frame))


def test_notes_tell_how_to_read_the_table(frame: pd.DataFrame) -> None:
    notes = " ".join(accuracy_notes(frame))
    expected = (
        "Model tiny-model",
        "all 1,411 rows",
        "95 % Wilson",
        "B_persist: bytes resident",
        "Development: B_persist on the development rows",
        "B_read: bytes that attention reads",
        "traffic, not storage",
        "10,000 resamples",
        "adjusted over this table's 6 comparisons",
        "Not run: h2o@0.33.",
        "fewer than 30 rows",
        "No verdict on the paper's figures: they are of Qwen3-4B-Instruct-2507",
    )
    for part in expected:
        assert part in notes


def test_csv_reads_back_with_rounded_percentages(frame: pd.DataFrame, tmp_path: Path) -> None:
    write_tables(frame, tmp_path)
    text = pd.read_csv(tmp_path / "accuracy.csv", dtype=str, keep_default_na=False)
    assert list(text.columns) == list(frame.columns)
    full = row(text, "full", "nonlive_overall")
    assert (full["k"], full["n"], full["accuracy_pct"]) == ("551", "600", "91.83")
    assert (full["ci_low"], full["b_persist"], full["budget"]) == ("89.37", "1.000000", "1.0")
    assert row(text, "pask@0.33", "nonlive_overall")["diff_vs_full_pp"] == "-3.83"
    assert (row(text, "h2o@0.33", "live_overall")[["k", "accuracy_pct"]] == "").all()


def test_markdown_is_a_table_with_counts_and_intervals(frame: pd.DataFrame, tmp_path: Path) -> None:
    write_tables(frame, tmp_path, title="Accuracy | of all", notes=["One more note."])
    lines = (tmp_path / "accuracy.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "### Accuracy \\| of all"
    assert lines[-1] == "- One more note."
    table = [line for line in lines if line.startswith("|")]
    assert any("92.08<br>221/240<br>88.0–94.9" in line for line in table)
    assert any(line.startswith("| H2O<br>target 0.33 | not run |") for line in table)
    assert any(r"0.410<br>off budget: 0.41" in line for line in table)
    assert any("−3.83<br>−7.5 to −0.2" in line for line in table)
    assert any(line.startswith("| *paper, Qwen3-4B* | *0.33* |") for line in table)


class _Page(HTMLParser):
    """Row lengths of each table, and every tag that was not closed in its turn."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.crossed: list[str] = []
        self.tables: list[list[int]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append(0)
        elif tag in ("td", "th"):
            self.tables[-1][-1] += 1

    def handle_endtag(self, tag: str) -> None:
        if self.open.pop() != tag:
            self.crossed.append(tag)


def test_html_is_well_formed_self_contained_and_rectangular(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    write_tables(frame, tmp_path, title="A < B & C")
    text = (tmp_path / "accuracy.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert (page.open, page.crossed) == ([], [])
    assert len(page.tables) == 4
    assert all(len(set(table)) == 1 for table in page.tables)
    assert "<title>A &lt; B &amp; C</title>" in text
    assert not any(word in text for word in ("http:", "https:", "src=", "<script"))
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert len(text.encode()) < 40_000


def test_latex_has_even_columns_and_escapes(tmp_path: Path) -> None:
    table = pd.concat([small_run(full=3), long_rows("other", SMALL, budget=0.5, sizes=SMALL)])
    write_tables(accuracy_table(table, PAPER, SMALL), tmp_path, title="50 % & more_")
    text = (tmp_path / "accuracy.tex").read_text(encoding="utf-8")
    assert r"Other \& Sons\_1" in text
    assert r"\caption{50 \% \& more\_. Non-live, accuracy in \%." in text
    assert text.isascii()
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 4
    rows = [line.replace(r"\&", "") for line in text.splitlines() if line.endswith(r" \\")]
    assert {line.count("&") for line in rows[:4]} == {7}


def test_same_frame_same_bytes(frame: pd.DataFrame, long: pd.DataFrame, tmp_path: Path) -> None:
    def digests(folder: str, table: pd.DataFrame) -> list[str]:
        paths = write_tables(table, tmp_path / folder)
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]

    entries = [*entries_of(long), NOT_RUN]
    shuffled = long.sample(frac=1, random_state=1)
    again = accuracy_table(shuffled, PAPER, TEST_SIZES, entries=entries, labels={"h2o": "H2O"})
    assert digests("a", frame) == digests("b", again)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "accuracy.csv", "accuracy.html", "accuracy.md", "accuracy.tex",
    ]  # fmt: skip


def test_long_table_survives_its_csv(long: pd.DataFrame, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    long.to_csv(path, index=False)
    pd.testing.assert_frame_equal(read_long(path), long, check_dtype=False)


def test_a_missing_or_foreign_long_table_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    with pytest.raises(PaskError, match="there is no long table; run the evaluation first"):
        read_long(path)
    path.write_text("id,correct\nx,1\n", encoding="utf-8")
    with pytest.raises(PaskError, match="the long table lacks model, split"):
        read_long(path)


@pytest.mark.parametrize("name", ["read_byte_steps", "b_development", "nominal"])
def test_a_long_table_of_an_older_form_is_refused(
    long: pd.DataFrame, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "long.csv"
    long.drop(columns=name).to_csv(path, index=False)
    with pytest.raises(PaskError, match=f"the long table lacks {name}$"):
        read_long(path)


def test_two_variants_of_one_label_are_told_apart() -> None:
    variant = long_rows("snapkv", dict.fromkeys(SMALL, 1), budget=0.33, sizes=SMALL)
    variant["entry"] = "snapkv-wide@0.33"
    table = accuracy_table(pd.concat([small_run(snapkv=2), variant]), PAPER, SMALL)
    names = [line.cells[0] for line in accuracy_blocks(table)[0].lines if not line.muted]
    assert names == [
        ("SnapKV", "target 0.33", "snapkv@0.33"),
        ("SnapKV", "target 0.33", "snapkv-wide@0.33"),
    ]


def test_outcomes_add_up_to_every_row(long: pd.DataFrame, tmp_path: Path) -> None:
    entries = [*entries_of(long), NOT_RUN]
    table = error_table(long, entries=entries, labels={"h2o": "H2O"}, smoke="tiny random model")
    assert list(table["outcome"].unique()) == ["correct", "malformed", "wrong_count"]
    run = table[table["entry"] != "h2o@0.33"]
    assert set(run.groupby("entry")["count"].sum()) == {1411}
    full = table[table["entry"] == "full"].set_index("outcome")["count"]
    assert full["correct"] == 551 + 610
    paths = write_errors(table, tmp_path)
    assert [path.name for path in paths] == ["errors.csv", "errors.md", "errors.html"]
    text = paths[1].read_text(encoding="utf-8")
    assert r"| wrong\_count | 124 |" in text
    assert "| correct | 1161 | 863 | 719 | 1112 | not run |" in text
    assert "> **Tiny random model: a smoke figure, not evidence.**" in text
