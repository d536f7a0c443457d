"""The evaluation step end to end on a tiny random model: resume, sharing, scoring, bad input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import yaml

from pask.bfcl.data import load_rows
from pask.bfcl.splits import Splits
from pask.cli import main
from pask.config import load
from pask.digests import digest
from pask.errors import HarnessFault
from pask.evaluation import keys, parts
from pask.evaluation.prompts import best, trials_table
from pask.evaluation.score import COLUMNS, long_table
from pask.evaluation.settings import settings_of
from pask.methods.full import FullKV
from tests.cpu.tiny import tiny_folder

SAMPLE = {"simple_python": 3, "multiple": 2, "parallel": 2, "live_simple": 1}
ROWS = sum(SAMPLE.values())
ENTRIES = ("full", "snapkv@0.20", "snapkv@0.50")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def pask(*arguments: str, cwd: Path) -> Done:
    """A command in this process: importing torch anew for each would take most of the time."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return Done(code, out.getvalue(), err.getvalue())


def ok(*arguments: str, cwd: Path) -> str:
    done = pask(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*arguments: str, cwd: Path, code: int = 2) -> str:
    """The one line on stderr of a command that must be refused."""
    done = pask(*arguments, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("evaluate ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_folder(folder, "llama", max_position_embeddings=16384)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model),
            "prompt": "one_example",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 24, "live": 24},
        },
        "data": {"sample": SAMPLE},
        "decode": {"max_new_tokens": 24},
        "engine": {"max_batch": 4, "shards": 2},
        "budget": {"search": False},
        "methods": [{"name": "full"}, {"name": "snapkv", "budgets": [0.2, 0.5]}],
    }
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    """A folder in which the run went through undisturbed, as two shards, and was scored."""
    cwd = tmp_path_factory.mktemp("finished")
    ok("splits", "--config", str(config), cwd=cwd)
    for shard in ("1/2", "2/2"):
        ok("evaluate", "--config", str(config), "--shard", shard, cwd=cwd)
    ok("score", "--config", str(config), cwd=cwd)
    return cwd


def files(cwd: Path) -> dict[str, bytes]:
    folder = cwd / "results/tiny/predictions"
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.jsonl"))}


def test_every_entry_answers_every_row(finished: Path) -> None:
    found = files(finished)
    assert sorted(found) == sorted(f"{e}/{s}-of-2.jsonl" for e in ENTRIES for s in (1, 2))
    sample = Splits.read(finished / "results/tiny/splits.json").sample("test", SAMPLE)
    ids = [row_id for group in sample.values() for row_id in group]
    for entry in ENTRIES:
        for shard in (1, 2):
            lines = found[f"{entry}/{shard}-of-2.jsonl"].decode().splitlines()
            assert [json.loads(line)["id"] for line in lines] == ids[shard - 1 :: 2]


def test_the_manifest_tells_what_decided_the_result(finished: Path) -> None:
    folder = finished / "results/tiny/predictions/snapkv@0.50"
    manifest = json.loads((folder / "1-of-2.manifest.json").read_text())
    assert manifest["decided_by"]["parameters"]["budget"] == 0.5
    assert manifest["decided_by"]["versions"].keys() >= {"torch", "xgrammar", "bfcl-eval"}
    assert manifest["items"] == manifest["items_computed_now"] == ROWS // 2
    assert manifest["key"][:16] in str(next((finished / "results/tiny/parts").glob("snapkv@0.50*")))


def test_kill_9_and_the_same_command_give_the_same_bytes(
    finished: Path, config: Path, tmp_path: Path
) -> None:
    ok("splits", "--config", str(config), cwd=tmp_path)
    for shard in ("1/2", "2/2"):
        command = ["evaluate", "--config", str(config), "--shard", shard]
        process = subprocess.Popen(
            [sys.executable, "-m", "pask", *command],
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        part = f"{shard[0]}-of-2.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            lines = sum(p.read_bytes().count(b"\n") for p in tmp_path.rglob(f"parts/*/{part}"))
            if lines >= 3:
                break
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not list(tmp_path.rglob(f"predictions/*/{part}")), "killed too late to test anything"
        torn = next(iter(tmp_path.rglob(f"parts/full-*/{part}")))
        with torn.open("ab") as out:  # a kill in the middle of a write
            out.write(b'{"finish": "stop", "id": "simple_py')
        ok(*command, cwd=tmp_path)
    assert files(tmp_path) == files(finished)
    ok("score", "--config", str(config), cwd=tmp_path)
    again, before = (cwd / "results/tiny/long.csv" for cwd in (tmp_path, finished))
    assert again.read_bytes() == before.read_bytes()


def test_a_finished_run_computes_nothing_again(finished: Path, config: Path) -> None:
    before = files(finished)
    ok("evaluate", "--config", str(config), "--shard", "1/2", cwd=finished)
    folder = finished / "results/tiny/predictions/full"
    assert json.loads((folder / "1-of-2.manifest.json").read_text())["items_computed_now"] == 0
    assert files(finished) == before


def test_one_method_alone_takes_what_the_shards_left(finished: Path, config: Path) -> None:
    ok("evaluate", "--config", str(config), "--methods", "snapkv", cwd=finished)
    folder = finished / "results/tiny/predictions"
    manifest = json.loads((folder / "snapkv@0.20/1-of-1.manifest.json").read_text())
    assert (manifest["items"], manifest["items_computed_now"]) == (ROWS, 0)
    assert not (folder / "full/1-of-1.jsonl").exists()
    out = finished / "snapkv.csv"
    ok(*f"score --config {config} --methods snapkv --shards 1 --out {out}".split(), cwd=finished)
    text = {"keep_default_na": False, "dtype": str}
    whole = pd.read_csv(finished / "results/tiny/long.csv", **text)
    pd.testing.assert_frame_equal(
        pd.read_csv(out, **text),
        whole[whole["method"] == "snapkv"].reset_index(drop=True),
    )


def test_the_long_table(finished: Path) -> None:
    long = pd.read_csv(finished / "results/tiny/long.csv", keep_default_na=False)
    assert tuple(long.columns) == COLUMNS
    assert len(long) == ROWS * len(ENTRIES)
    assert long.groupby("entry").size().to_dict() == dict.fromkeys(ENTRIES, ROWS)
    full = long[long["entry"] == "full"]
    resident = full["resident_prompt_bytes"] + full["resident_decode_bytes"]
    assert (resident == full["full_bytes"]).all()
    assert (full["resident_byte_steps"] == full["full_byte_steps"]).all()
    assert (long["read_byte_steps"] == long["resident_byte_steps"]).all()  # no second stage here
    assert set(long["b_development"]) == {""}  # nothing was searched
    fifth = long[long["entry"] == "snapkv@0.20"]
    kept = fifth["resident_prompt_bytes"].sum() / fifth["full_prompt_bytes"].sum()
    assert 0.1 < kept < 0.2  # less than a fifth: the answer, all kept, takes its share
    wrong = long[long["correct"] == 0]
    assert (wrong["error_type"] != "").all()


def test_missing_predictions_are_a_fault_of_the_harness(finished: Path, config: Path) -> None:
    loaded = load(config)
    ids = Splits.read(finished / "results/tiny/splits.json").sample("test", SAMPLE)
    first = finished / "results/tiny/predictions/full/1-of-2.jsonl"
    with pytest.raises(HarnessFault, match=f"{ROWS // 2} of {ROWS} items have no prediction"):
        long_table(loaded, ids, {"full": [first]}, {"full": FullKV()})
    with pytest.raises(HarnessFault, match="is there twice"):
        long_table(loaded, ids, {"full": [first, first]}, {"full": FullKV()})


def test_a_damaged_part_file_is_named(finished: Path, config: Path, tmp_path: Path) -> None:
    ok("splits", "--config", str(config), cwd=tmp_path)
    part = next(iter(finished.rglob("parts/full-*/1-of-2.jsonl")))
    copy = tmp_path / part.relative_to(finished)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(b"\x00\x00\n" + part.read_bytes())
    line = refused("evaluate", "--config", str(config), cwd=tmp_path)
    assert "1-of-2.jsonl: line 1 is damaged" in line


BAD_INPUT = {
    "an unknown key": (["--set", "modle.name=x"], "unknown key 'modle'"),
    "an unknown method": (["--set", "methods=[{name: snapkw}]"], "did you mean 'snapkv'?"),
    "an unknown prompt": (["--set", "model.prompt=one_exampel"], "did you mean 'one_example'?"),
    "another split": (["--set", "data.seed=5"], "it is the paper split, seed 0; the config asks"),
    "a method not in the run": (["--methods", "h2o"], "'h2o' is not in this run"),
    "a missing model": (["--set", "model.source=/nowhere/model"], "/nowhere/model: no such model"),
    "a shard": (["--shard", "3/2"], "cannot read the shard '3/2'"),
    "a template without tools": (["--set", "model.prompt=native"], "prompt style 'native'"),
    "a sample too large": (["--set", "data.sample={live_parallel: 99}"], "99 rows asked"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_line_and_leaves_nothing(
    finished: Path, config: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    ok("splits", "--config", str(config), cwd=tmp_path)
    assert expected in refused("evaluate", "--config", str(config), *arguments, cwd=tmp_path)
    assert not list(tmp_path.rglob("predictions/*/*"))


WRONG_ORDER = {
    "evaluate before splits": ("evaluate", [], "cannot read the split file"),
    "score before evaluate": ("score", [], "full/1-of-2.jsonl: no predictions of this shard"),
    "tables before score": ("tables", [], "long.csv: there is no long table"),
}


@pytest.mark.parametrize(("command", "more", "expected"), WRONG_ORDER.values(), ids=WRONG_ORDER)
def test_steps_in_the_wrong_order(
    config: Path, tmp_path: Path, command: str, more: list[str], expected: str
) -> None:
    if command != "evaluate":
        ok("splits", "--config", str(config), cwd=tmp_path)
    assert expected in refused(command, "--config", str(config), *more, cwd=tmp_path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("decode.max_new_tokens=999", "another max_new_tokens"),
        ("model.answer_form=tool_call", "another answer_form"),
        ("model.name=other", "another name"),
        (
            "methods=[{name: full}, {name: snapkv, budgets: [0.2], params: {window: 4}}]",
            "snapkv@0.20/1-of-2.jsonl: the predictions were made under another parameters",
        ),
    ],
)
def test_results_are_never_relabelled(
    finished: Path, config: Path, override: str, expected: str
) -> None:
    arguments = ["--config", str(config), "--set", override]
    assert expected in refused("score", *arguments, cwd=finished)
    assert "made for another config" in refused("tables", *arguments, cwd=finished)


def test_a_folder_that_cannot_be_written_is_one_line(config: Path, tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    line = refused("splits", "--config", str(config), cwd=tmp_path)
    assert "results" in line
    assert "pask: error: " in line


def test_an_edited_split_file_is_refused(config: Path, tmp_path: Path) -> None:
    ok("splits", "--config", str(config), cwd=tmp_path)
    path = tmp_path / "results/tiny/splits.json"
    text = path.read_text()
    path.write_text(text.replace('"seed": 0', '"seed": 1'))
    assert "splits.json" in refused("evaluate", "--config", str(config), cwd=tmp_path)


def test_a_key_changes_with_what_decides_and_with_nothing_else(config: Path) -> None:
    def key(*overrides: str) -> str:
        loaded = load(config, overrides)
        methods = settings_of(loaded, "model").methods.values()
        method = next(m for m in methods if m.name == "snapkv")
        return digest(keys.key_parts(loaded, method, "model"))

    assert key() == key("engine.max_batch=64", "engine.shards=7", "data.sample={multiple: 1}")
    decisive = [
        "model.prompt=both_examples",
        "model.answer_form=tool_call",
        "model.expected_new_tokens.live=25",
        "decode.max_new_tokens=25",
        "engine.kv_dtype=float32",
        "methods=[{name: snapkv, budgets: [0.2], params: {window: 8}}]",
    ]
    assert len({key(), *(key(override) for override in decisive)}) == 1 + len(decisive)


def test_the_best_prompt_is_the_one_with_most_right_then_the_shorter() -> None:
    def trial(style: str, k: int, length: float) -> dict[str, object]:
        return {
            "style": style,
            "answer_form": "json_list",
            "k": k,
            "n": 10,
            "mean_prompt_tokens": length,
            "categories": {"multiple": {"k": k, "n": 10}},
            "number_of_calls": {"right": k, "too_many": 1, "too_few": 2, "malformed": 0},
            "cut_off": 0,
            "mean_new_tokens": {"nonlive": 31.5, "live": 30.0},
        }

    trials = [trial("a", 4, 100.0), trial("b", 6, 300.0), trial("c", 6, 200.0)]
    assert best(trials)["style"] == "c"
    rows = trials_table(trials).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| c", "| b", "| a"]
    assert rows[0] == "| c | json_list | 6/10 | 6/10 | 6 / 1 / 2 | 0 | 31.5 / 30 |"


def test_records_do_not_depend_on_the_batch(finished: Path, config: Path, tmp_path: Path) -> None:
    ok("splits", "--config", str(config), cwd=tmp_path)
    ok("evaluate", "--config", str(config), "--set", "engine.max_batch=1", cwd=tmp_path)
    alone = parts.finished(next(tmp_path.rglob("parts/snapkv@0.20-*")))
    together = parts.finished(next(finished.rglob("parts/snapkv@0.20-*")))
    assert len(alone) == ROWS
    assert alone == together
    assert set(alone) <= set(load_rows())
