"""The benchmarks run on a tiny model and say what they measured; never how fast this machine is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pask.bench import Measured
from pask.cli import main
from tests.cpu.tiny import tiny_folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("bench"), {"simple_python": 2, "parallel": 1})


@pytest.fixture(scope="module")
def more_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("bench"), {"simple_python": 6, "parallel": 4})


def written(folder: Path, sample: dict[str, int]) -> Path:
    model = tiny_folder(folder, "llama", max_position_embeddings=16384, head_dim=32)
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model),
            "prompt": "one_example",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 40, "live": 40},
        },
        "data": {"sample": sample},
        "decode": {"max_new_tokens": 24},
        "engine": {"kv_dtype": "float32"},
        "structure": {"layer_groups": 2},
        "budget": {"search": False},
        "methods": [{"name": "full"}, {"name": "snapkv", "budgets": [0.5]}],
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def test_tags_are_timed_on_the_tokens_that_the_model_chose(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tags", "--config", str(config), "--items", "3"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["name"] == "tags"
    assert 3 < result["n"] <= 3 * 24
    # Both sides are rounded to two digits; the ratio is made before.
    assert result["ratio"] == pytest.approx(result["theirs"] / result["ours"], rel=0.02)
    for line in ("tagging, a token", "accept_token", "bitmask", "compiling the grammar"):
        assert captured.err.count(line) == 1


def test_more_rows_than_there_are_and_unknown_benchmarks_are_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tags", "--config", str(config), "--items", "4"]) == 2
    assert "--items must be 1 to 3, not 4" in capsys.readouterr().err
    assert main(["bench", "tag", "--config", str(config)]) == 2
    assert "unknown benchmark 'tag'; did you mean 'tags'?" in capsys.readouterr().err


def test_a_ratio_says_how_many_times_better_ours_is() -> None:
    assert Measured(6.0, 3.0, "rows/hour", 1).ratio == 2
    assert Measured(3.0, 6.0, "seconds", 1, less_is_better=True).ratio == 2


def test_lockstep_walks_until_it_has_its_tokens(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "lockstep", "--config", str(config), "--items", "300"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["n"] >= 300
    assert f"desyncs=0 in {result['n']} tokens" in captured.err


def test_evaluation_is_timed_against_a_loop_that_gives_the_same_answers(
    more_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "evaluate", "--config", str(more_rows), "--items", "10"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["n"] == 10
    assert result["ratio"] == pytest.approx(result["ours"] / result["theirs"], rel=0.02)
    assert "10 rows, 2 methods, 2 cores: ours 20 item-methods" in captured.err
    assert "plain loop 2 item-methods" in captured.err
    assert "equal answers 2/2" in captured.err


def test_replay_is_counted_against_regeneration_with_equal_answers(
    more_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "replay", "--config", str(more_rows), "--items", "7"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["n"] == 7
    assert 1 < result["ours"] < result["theirs"]
    assert "7 interventions on 24 rows" in captured.err
    assert "equal answers and bytes 7/7" in captured.err


def test_calibration_is_counted_against_regeneration(
    more_rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "calibrate", "--config", str(more_rows), "--items", "2"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["n"] == 2
    assert 0 < result["ours"] < result["theirs"]
    assert result["ratio"] == pytest.approx(result["theirs"] / result["ours"], abs=0.01)
    assert "2 rows, " in captured.err
    assert "levels of R,L4,H, window 4" in captured.err  # the default method's: the run has none
    assert "given up" in captured.err
    assert "goal 60" in captured.err


def test_a_device_is_for_the_kernels_alone(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tags", "--config", str(config), "--device", "cuda"]) == 2
    assert "'tags' measures on the CPU; --device is for: kernels" in capsys.readouterr().err
