"""The policy page: tables, correlation and figures of policies small enough to follow by hand."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import long_fixture
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_fixture import long_rows

from pask.config import (
    BudgetConfig,
    DataConfig,
    EngineConfig,
    Entry,
    ModelConfig,
    RunConfig,
    StructureConfig,
)
from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.policy.evidence import BucketEvidence, Evidence, Failures
from pask.policy.floors import Thresholds, floors, no_floors
from pask.policy.path import greedy_path, round_robin_path
from pask.policy.policy import Policy, Scanned, SidePolicy, gate_items
from pask.report.paper import read_table
from pask.report.policy_correlation import rank_correlation
from pask.report.policy_frames import (
    bucket_frame,
    candidate_frame,
    cheapest,
    default_family,
    distinct_candidates,
    frontier,
    layer_names,
    packed_sides,
)
from pask.report.policy_notes import smoke
from pask.report.policy_page import write_policy_page
from pask.report.policy_selection import selection_table
from pask.report.policy_tables import ablation_table, thresholds_table
from pask.structure.buckets import LayerBucket

R, L, H = Level.RELEASE, Level.LOW4, Level.HIGH
NARROW, WIDE = Thresholds(0.02, 0.04), Thresholds(0.06, 0.08)


def bucket(
    name: str, group: int, distortion: tuple[float, float], lost: tuple[int, int], gained: int = 0
) -> BucketEvidence:
    """Of 40 rows; `distortion` and `lost` at R and at L, `gained` at R."""
    failures = {R: Failures(40, lost[0], gained, 40), L: Failures(40, lost[1], 0, 40)}
    levels = dict(zip((R, L, H), (*distortion, 0.0), strict=True))
    return BucketEvidence(LayerBucket(name, group), 1.0, levels, failures, 9)


def evidence(side: str = "decode") -> Evidence:
    return Evidence(
        side,
        Ladder(),
        (2, 1),
        40,
        (
            bucket("a", 0, (4.0, 1.0), (4, 1)),  # V 10 and 2.5 points
            bucket("a", 1, (1.0, 0.5), (0, 2)),  # V 0 and 5: V-bar is 5 at both
            bucket("b", 0, (0.2, 0.1), (1, 0), gained=1),
            bucket("b", 1, (0.0, 0.0), (0, 0)),
        ),
    )


def tried(tau: Thresholds | None, steps: int, cost: float, failures: int) -> Scanned:
    """On 200 rows, 20 of them wrong under the reference."""
    lost, gained = max(0, failures - 20), max(0, 20 - failures)
    return Scanned(tau, steps, cost, 200, 20, lost, gained)


# Floors of NARROW: a L and H, b R and R; of WIDE: a L and R, b R and R. Two upgrades of WIDE, both
# of a in layer 2, give NARROW's floors, and the third is NARROW's first: a in layers 0-1 to H.
CANDIDATES = (
    tried(NARROW, 0, 0.40, 31),
    tried(NARROW, 1, 0.60, 30),  # 10 of 200 more: exactly 5 points
    tried(NARROW, 5, 1.00, 20),
    tried(WIDE, 2, 0.40, 31),
    tried(WIDE, 3, 0.60, 30),
    tried(WIDE, 5, 0.90, 18),
    tried(WIDE, 7, 1.00, 20),
)


def side(
    tau: Thresholds | None = NARROW,
    steps: int = 1,
    ranking: str = "distortion",
    candidates: tuple[Scanned, ...] = CANDIDATES,
    name: str = "decode",
) -> SidePolicy:
    found = evidence(name)
    least = no_floors(found) if tau is None else floors(found, tau)
    path = (greedy_path if ranking == "distortion" else round_robin_path)(found, least)
    return SidePolicy(found, tau, ranking, least, path, steps, candidates, 0.05)


def policy(decode: SidePolicy, prompt: SidePolicy | None = None) -> Policy:
    return Policy({}, 3, (0, 2), "role", 4, 0.9, decode, prompt, {}, 1.0)


FULL = policy(side(), side(name="prompt"))
NO_RANKING = policy(side(ranking="round_robin", candidates=(tried(NARROW, 1, 0.7, 29),)))
NO_FLOORS = policy(side(None, 2, candidates=(tried(None, 2, 0.95, 22),)))
POLICIES = {"x": NO_FLOORS, "y": NO_RANKING, "pask": FULL, "pask_decode": FULL}
ENTRIES = (
    Entry("full", "full", 1.0, {}),
    Entry("pask@0.33", "pask", 0.33, {}),
    Entry("pask_decode@0.95", "pask_decode", 0.95, {}),
)
SIZES = {"simple_python": 10, "live_simple": 5}


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """Full KV 9/10 and 4/5, the decode side alone 7/10 and 4/5 at half of the answers' bytes."""
    monkeypatch.setitem(long_fixture.LABELS, "pask_decode", "PASK, decode only")
    ours = long_rows("pask_decode", {"simple_python": 7, "live_simple": 4}, budget=0.95,
                     reached=0.5, sizes=SIZES)  # fmt: skip
    full = long_rows("full", {"simple_python": 9, "live_simple": 4}, budget=1.0, sizes=SIZES)
    return pd.concat([ours, full])


def test_a_side_is_named_by_what_it_has_and_equal_ones_are_one() -> None:
    found = [(one.role, one.families) for one in packed_sides(POLICIES, "decode")]
    assert found == [
        ("PASK", ("pask", "pask_decode")),
        ("w/o D-ranking", ("y",)),
        ("w/o V-floor", ("x",)),
    ]
    neither = policy(side(None, 0, "round_robin"))
    assert packed_sides({"z": neither}, "decode")[0].role == "w/o D-ranking and V-floor"
    assert default_family(POLICIES) == "pask"
    assert default_family({"x": NO_FLOORS}) == "x"
    assert [one.families for one in packed_sides(POLICIES, "prompt")] == [("pask", "pask_decode")]


def test_layers_of_groups() -> None:
    assert layer_names((2, 1, 10)) == ["0–1", "2", "3–12"]


def test_the_buckets_v_and_its_envelope_are_in_points() -> None:
    frame = bucket_frame(side()).set_index(["bucket", "group", "level"])
    shown = frame[["v_pp", "v_bar_pp", "distortion", "floor", "action", "layers"]]
    assert [tuple(row) for row in shown.loc["a"].to_numpy()] == [
        (10.0, 10.0, 4.0, "L4", "H", "0–1"),
        (2.5, 2.5, 1.0, "L4", "H", "0–1"),
        (0.0, 5.0, 1.0, "H", "H", "2"),
        (5.0, 5.0, 0.5, "H", "H", "2"),
    ]
    # The score test of V = 0 is McNemar's: 4 / sqrt(4) is above 1.96, 2 / sqrt(2) is not.
    assert (frame["v_low"] > 0).sum() == 1
    assert frame.loc[("a", 0, "R"), "v_low"] > 0


@pytest.mark.parametrize(
    ("alpha", "rows", "items"),
    [(0.05, 200, 10), (0.05, 199, 9), (0.02, 49, 0), (0.07, 100, 7), (0.29, 100, 29), (0, 9, 0)],
)
def test_the_gate_in_rows_is_what_the_gate_lets_pass(alpha: float, rows: int, items: int) -> None:
    assert gate_items(alpha, rows) == items
    assert Scanned(None, 0, 1.0, rows, 0, items, 0).within(alpha)
    assert not Scanned(None, 0, 1.0, rows, 0, items + 1, 0).within(alpha)


def test_candidates_are_counted_once_however_they_were_reached() -> None:
    assert distinct_candidates(side()) == 4
    frame = candidate_frame(side())
    assert frame["within"].tolist() == [0, 1, 1, 0, 1, 1, 1]
    assert frame["selected"].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert frame["increase_pp"].tolist() == pytest.approx([5.5, 5, 0, 5.5, 5, -1, 0])
    assert frame["tau_low_pct"].tolist() == [2.0] * 3 + [6.0] * 4


def test_the_curve_steps_where_the_cheapest_candidate_changes() -> None:
    found = frontier(side())
    shown = found[["alpha_pp", "b", "tau_low_pct", "steps"]].to_numpy().tolist()
    assert shown == [
        pytest.approx(row)
        for row in ([0, 0.9, 6, 5], [5, 0.6, 2, 1], [5.5, 0.4, 2, 0], [10, 0.4, 2, 0])
    ]
    assert frontier(side(candidates=())).empty


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(0, 20),
)
def test_the_curve_is_the_least_cost_at_any_tolerance(
    drawn: list[tuple[int, int]], half_points: int
) -> None:
    """Costs in sixteenths and failures of 200 rows, against the definition."""
    candidates = tuple(
        [tried(NARROW, 0, cost / 16, failures) for cost, failures in drawn]
        + [tried(NARROW, 5, 1.0, 20)]
    )
    least = min(seen.cost for seen in candidates if seen.failures - 20 <= half_points)
    found = cheapest(candidates, half_points / 200)
    assert found is not None
    assert found.cost == least
    curve = frontier(side(candidates=candidates))
    before = curve[curve["alpha_pp"] <= half_points / 2 + 1e-6]
    assert before["b"].iloc[-1] == least


def test_ablation_has_the_papers_rows_beside_ours(long: pd.DataFrame) -> None:
    frame = ablation_table(POLICIES, read_table(4), long, ENTRIES)
    assert frame["variant"].tolist() == (
        ["Full KV"] * 2 + ["PASK"] * 2 + ["w/o D-ranking", "w/o V-floor"]
    )
    assert frame["subset"].tolist() == ["nonlive", "live"] * 2 + ["", ""]
    assert frame["decode_b_pct"].tolist() == pytest.approx([100, 100, 60, 60, 70, 95])
    assert frame["dev_k"].tolist() == [180, 180, 170, 170, 171, 178]
    assert set(frame["dev_n"]) == {200}
    assert frame["test_k"].tolist()[:4] == [9, 4, 7, 4]
    assert frame["test_k"].isna().tolist()[4:] == [True, True]
    assert frame.loc[2, "diff_pp"] == pytest.approx(-20)
    assert frame.loc[3, "diff_pp"] == pytest.approx(0)
    assert frame.loc[2, "test_b_decode_pct"] == pytest.approx(50)
    assert frame.loc[2, "entry"] == "pask_decode@0.95"
    printed = frame[frame["subset"] != "live"].set_index("variant")
    assert printed["paper_decode_b_pct"].to_dict() == {
        "Full KV": 100.0, "PASK": 50.08, "w/o D-ranking": 60.67, "w/o V-floor": 98.49,
    }  # fmt: skip
    assert printed.loc["PASK", "paper_diff_pp"] == -4.16
    assert frame.loc[frame["subset"] == "live", "paper_test_pct"].isna().all()


def test_what_has_no_policy_is_in_the_ablation_without_figures() -> None:
    frame = ablation_table({"pask": FULL}, read_table(4)).set_index("variant")
    assert list(frame.index) == ["Full KV", "PASK", "w/o D-ranking", "w/o V-floor"]
    assert np.isnan(frame.loc["w/o V-floor", "decode_b_pct"])
    assert frame["test_k"].isna().all()


def test_rows_that_are_not_of_the_test_split_are_no_test(long: pd.DataFrame) -> None:
    development = long.assign(split="paper/dev")
    assert ablation_table(POLICIES, read_table(4), development, ENTRIES)["test_k"].isna().all()
    assert selection_table(POLICIES, development, ENTRIES)["shrinkage_pp"].isna().all()


def test_thresholds_have_their_first_admissible_candidate_and_the_papers_row() -> None:
    frame = thresholds_table(side(), read_table(5))
    assert frame["tau_low_pct"].tolist() == [2, 6, 0.5, 1]  # the last two are the paper's alone
    assert frame["tau_high_pct"].tolist() == [4, 8, 1, 2]
    assert frame["paper_decode_b_pct"].fillna(0).tolist() == [68.54, 0, 50.08, 65.50]
    assert frame["paper_dev_pct"].fillna(0).tolist() == [86.0, 0, 85.5, 85.5]
    assert frame["candidates"].isna().tolist() == [False, False, True, True]
    ours = frame.iloc[:2]
    assert ours["floors"].tolist() == ["R 2, L4 1, H 1", "R 3, L4 1, H 0"]
    assert ours["decode_b_pct"].tolist() == pytest.approx([60, 60])
    assert ours["dev_k"].tolist() == [170, 170]
    assert ours["steps"].tolist() == [1, 3]
    assert ours["admissible"].tolist() == [2, 3]
    assert ours["selected"].tolist() == [1, 0]


def test_selection_says_how_little_it_rests_on(long: pd.DataFrame) -> None:
    frame = selection_table(POLICIES, long, ENTRIES)
    assert frame["side"].tolist() == ["decode"] * 3 + ["prompt"]
    first = frame.iloc[0]
    shown = ["candidates", "distinct", "admissible", "gate_items", "failures",
             "reference_failures", "cal_rows", "intervals", "v_zero", "harmful",
             "helpful"]  # fmt: skip
    assert first[shown].tolist() == [7, 4, 5, 10, 30, 20, 40, 8, 5, 1, 0]
    assert first["increase_pp"] == pytest.approx(5)
    # Full KV is right on 13 of 15, ours on 11.
    assert first["test_n"] == 15
    assert first["test_increase_pp"] == pytest.approx(100 * 2 / 15)
    assert first["shrinkage_pp"] == pytest.approx(100 * 2 / 15 - 5)
    assert frame["shrinkage_pp"].isna().tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("x", "y", "rho"),
    [
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),  # 1 - 6 * 4 / (5 * 24)
        ([1, 2, 3, 4], [0, 0, 1, 1], 2 / 5**0.5),  # ranks 1.5 1.5 3.5 3.5
        ([1e-9, 1e-3, 5.0], [3, 2, 1], -1.0),
    ],
)
def test_rank_correlation_with_and_without_ties(x: list[float], y: list[float], rho: float) -> None:
    found = rank_correlation(x, y, [str(i) for i in range(len(x))])
    assert found.rho == pytest.approx(rho)
    assert found.n == found.names == len(x)


def test_no_variation_is_no_correlation_and_two_names_are_no_interval() -> None:
    flat = rank_correlation([1, 2, 3], [0, 0, 0], ["a", "b", "c"])
    assert np.isnan(flat.rho)
    assert np.isnan(flat.p)
    few = rank_correlation([1, 2, 3], [1, 2, 3], ["a", "a", "b"])
    assert few.rho == pytest.approx(1)
    assert np.isnan(few.low)
    assert np.isnan(few.p)


def test_the_permutation_moves_names_whole() -> None:
    """Against all 120 orders of five names of two items; two of six would be much rarer."""
    x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    y = [1, 2, 5, 6, 3, 4, 7, 8, 9, 10]
    names = [name for name in "abcde" for _ in range(2)]
    found = rank_correlation(x, y, names)
    pairs = [y[at : at + 2] for at in range(0, 10, 2)]
    rhos = [
        np.corrcoef(x, [value for pair in order for value in pair])[0, 1]
        for order in itertools.permutations(pairs)
    ]
    exact = np.mean(np.abs(rhos) >= abs(found.rho) - 1e-9)
    assert found.p == pytest.approx(exact, abs=0.01)
    assert found.low <= found.rho <= found.high


def test_names_with_fewer_items_lose_none() -> None:
    x, y = [3.0, 1.0, 2.0, 5.0, 4.0], [1.0, 2.0, 3.0, 5.0, 4.0]
    found = rank_correlation(x, y, ["a", "a", "b", "c", "d"], resamples=500)
    # d squared: 4, 1, 1, 0, 0
    assert found.rho == pytest.approx(1 - 6 * 6 / 120)
    assert (found.n, found.names) == (5, 4)
    with pytest.raises(ValueError, match="rank correlation: 5, 5 and 1 values"):
        rank_correlation(x, y, ["a"])


def run_config() -> RunConfig:
    return RunConfig(
        run="tiny",
        model=ModelConfig("tiny_model", "", None, None, None, "p", "json_list", {}),
        data=DataConfig("paper", 0, "test", None, None, None),
        max_new_tokens=8,
        engine=EngineConfig("float16", 1, 64, 16, 1),
        structure=StructureConfig((0, 2), "role"),
        budget=BudgetConfig(False, 0.01),
        entries=ENTRIES,
        paper_model="Qwen3-4B",
    )


@pytest.fixture
def page(long: pd.DataFrame, tmp_path: Path) -> dict[str, Path]:
    paths = write_policy_page(run_config(), POLICIES, long, tmp_path / "a")
    assert sorted(paths) == sorted((tmp_path / "a").iterdir())
    return {path.name: path for path in paths}


def test_the_page_shows_tables_figures_and_that_it_is_a_sample(
    page: dict[str, Path], long: pd.DataFrame, tmp_path: Path
) -> None:
    text = page["policies.md"].read_text(encoding="utf-8")
    assert (
        "> **Sample of 40 calibration and 200 development rows: a smoke figure, not evidence.**"
        in text
    )
    for line in (
        # selection
        "| PASK<br>pask, pask\\_decode<br>pask\\_decode@0.95 | decode | 2 / 4 | 7<br>4 distinct "
        "| 5.0 %<br>10 of 200 | 30 / 200<br>Full KV 20 / 200 | +5.00<br>",
        " | +8.33 | 1<br>of 8, 40 rows | 0 |",
        # ablation
        "| w/o V-floor<br>x | 95.00 | 89.00<br>178/200<br>83.9–92.6 | not run | not run |",
        "| *paper, non-live* | *98.49* | *–* | *90.33* | *−1.50* | *–* | *–* |",
        "70.00<br>7/10<br>39.7–89.2<br>reached decode B 50.00 % | −20.00<br>",
        # thresholds
        "| 2 / 4<br>selected | 60.00 | 85.00<br>170/200<br>79.4–89.3 | R 2, L4 1, H 1 | "
        "3<br>2 within | 1 |",
        "| *paper* | *50.08* | *85.5* |",
        # correlation: D 4, 1, 0.2, 0 against V 10, 0, 0, 0; 2 names
        "| decode | R | +0.77 | – | 4<br>2 names | 3<br>of 4 |",
        "V comes in steps of one row of 40, 2.50 points: 10 of 16 V of pask are exactly 0, 8 of",
        "No entry of pask_decode follows: y; x.",
    ):
        assert line in text, line
    markup = page["policies.html"].read_text(encoding="utf-8")
    assert markup.count('src="data:image/svg+xml;base64,') == 3
    assert markup.count("<ul>") == 1
    again = write_policy_page(run_config(), POLICIES, long, tmp_path / "b")
    for path in again:
        assert path.read_bytes() == page[path.name].read_bytes(), path.name
    for name in ("buckets", "candidates", "frontier", "correlation", "ablation"):
        assert len(pd.read_csv(page[f"policy_{name}.csv"])), name
    # LaTeX is told how to write these few, and no others.
    assert set(page["policies.tex"].read_text(encoding="utf-8")) - set("–−") <= {
        *map(chr, range(127))
    }
    buckets = texts(page["policy_buckets.svg"])
    for shown in ("decode side, 2 names", "0–1", "L4→H", "D=0", "10.0", "V̄(R), points"):
        assert shown in buckets, shown
    assert "R: ρ = 0.77, n = 4" in texts(page["policy_mismatch.svg"])
    cost = texts(page["policy_cost.svg"])
    assert "decode side, n = 200" in cost
    assert "τ = 6 / 8 %" in cost


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def test_a_policy_without_prompt_candidates_or_run_still_has_its_page(tmp_path: Path) -> None:
    bare = policy(side(candidates=()))
    paths = write_policy_page(run_config(), {"pask": bare}, None, tmp_path)
    text = (tmp_path / "policies.md").read_text(encoding="utf-8")
    assert "Sample of 40 calibration and 0 development rows" in text
    assert "| PASK<br>pask | not run | not run | not run | not run |" in text
    assert not [path for path in paths if path.name.startswith("policy_cost.svg")]
    with pytest.raises(ValueError, match="there are no policies"):
        write_policy_page(run_config(), {}, None, tmp_path)


@pytest.mark.parametrize(
    ("calibration", "development", "warned"),
    [(100, 100, False), (99, 100, True), (100, 99, True), (100, None, True)],
)
def test_few_rows_of_either_part_make_a_smoke_figure(
    calibration: int, development: int | None, warned: bool
) -> None:
    frame = pd.DataFrame({"cal_rows": [calibration, 500], "dev_rows": [development, None]})
    assert ("smoke figure" in smoke(frame, 100)) is warned


def test_the_warning_says_on_how_few_and_how_many_rows_the_policies_rest() -> None:
    frame = pd.DataFrame({"cal_rows": [200, 32, 200], "dev_rows": [64, 64, None]})
    assert smoke(frame, 100).startswith("Sample of 32 to 200 calibration and 64 development rows:")
