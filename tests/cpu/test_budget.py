"""Knobs set on development rows: what is counted, what is found, and what it is refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

from pask.bfcl.data import load_rows
from pask.bfcl.request import RequestBuilder
from pask.config import load
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.evaluation.dry_run import Case, count
from pask.methods.pask import PASK
from pask.methods.registry import make_method, method_class, registry
from tests.cpu.conformance_cases import measured
from tests.cpu.test_evaluation import ok, refused
from tests.cpu.tiny import tiny_folder

SAMPLE = {"simple_python": 3, "multiple": 2, "live_simple": 1}
TARGETS = [0.2, 0.33, 0.5]
SHAPE = {"head_dim": 32, "hidden_size": 128, "max_position_embeddings": 16384}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama", **SHAPE)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(folder),
            "prompt": "one_example",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 24, "live": 24},
        },
        "data": {"sample": SAMPLE, "dev_sample": SAMPLE, "cal_sample": {"multiple": 2}},
        "decode": {"max_new_tokens": 24},
        "engine": {"max_batch": 8, "shards": 1},
        "methods": [
            {"name": "full"},
            {"name": "snapkv", "budgets": [*TARGETS, 0.02]},
            {"name": "h2o", "budgets": TARGETS},
            {"name": "triaxialkv_rlh", "budgets": [0.33]},
            {"name": "uniform_int4"},
        ],
    }
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    cwd = tmp_path_factory.mktemp("searched")
    for command in (["splits"], ["trajectories", "--part", "dev"], ["calibrate"], ["budget"]):
        ok(*command, "--config", str(config), cwd=cwd)
    return cwd


def settings(cwd: Path) -> dict[str, dict[str, Any]]:
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted((cwd / "results/tiny/budgets").glob("*.json"))
    }


@pytest.mark.parametrize("name", sorted(registry()))
def test_a_dry_run_counts_the_bytes_of_decoding(model: LoadedModel, name: str) -> None:
    """On the method's own answers both have stored the same tokens, so every byte must agree."""
    cls = method_class(name)
    low, high = cls.knob_range
    builder = RequestBuilder(model.tokenizer, tokenizer_info(model), "one_example", "json_list")
    rows = [row for row in load_rows().values() if row.category == "multiple"][:4]
    requests = [builder.build(row) for row in rows]
    method = make_method(
        name,
        None,
        {},
        nominal=low + 0.4 * (high - low) if cls.budgets[0] < cls.budgets[1] else None,
        measured=measured(name),
    )
    limits = Limits(40)
    answers = {
        found.request_id: found
        for found in generate(model, [Task(r, (("m", method),), 40) for r in requests], limits)
    }
    cases = [
        Case(r, answers[r.id].token_ids, answers[r.id].finish == "length", 40) for r in requests
    ]
    counted = count(model, method, cases, limits, torch.float16)
    assert counted.full == sum(found.bytes.full for found in answers.values())
    assert counted.resident == sum(
        found.bytes.prompt + found.bytes.decode for found in answers.values()
    )
    assert counted.unreachable == sum("unreachable" in a.notes for a in answers.values())
    if issubclass(cls, PASK):  # the answer is not merely kept at HIGH
        parts = [found.bytes for found in answers.values()]
        assert any(part.decode != part.full - part.full_prompt for part in parts)


def test_every_knob_meets_its_budget_on_the_development_rows(searched: Path) -> None:
    found = settings(searched)
    assert found["full"]["status"] == "fixed"
    assert found["full"]["reached"] == 1.0
    assert found["uniform_int4"]["nominal"] is None
    for name, entry in found.items():
        if entry["status"] != "met":
            continue
        assert abs(entry["reached"] - entry["budget"]) <= 0.005, name
        assert [entry["nominal"], entry["reached"]] in entry["tried"], name
    met = {name for name, entry in found.items() if entry["status"] == "met"}
    assert met >= {"h2o@0.20", "h2o@0.33", "h2o@0.50", "triaxialkv_rlh@0.33", "snapkv@0.50"}


def test_a_budget_out_of_range_says_so_down_to_the_table(searched: Path, config: Path) -> None:
    assert settings(searched)["snapkv@0.02"]["status"] == "not reachable"
    for command in ("evaluate", "score", "tables", "figures"):
        ok(command, "--config", str(config), cwd=searched)
    long = pd.read_csv(searched / "results/tiny/long.csv")
    assert "snapkv@0.02" not in set(long["entry"])
    table = pd.read_csv(searched / "results/tiny/tables/accuracy.csv", keep_default_na=False)
    flags = table[table["entry"] == "snapkv@0.02"]
    assert set(flags["flag"]) == {"not reachable"}
    assert set(flags["k"]) == {""}
    text = (searched / "results/tiny/tables/accuracy.md").read_text()
    assert "Not reachable: snapkv@0.02" in text
    assert "its own bytes" in text


def test_the_knob_that_was_found_is_the_one_that_answers(searched: Path, config: Path) -> None:
    ok("evaluate", "--config", str(config), cwd=searched)
    path = searched / "results/tiny/predictions/h2o@0.33/1-of-1.manifest.json"
    parameters = json.loads(path.read_text())["decided_by"]["parameters"]
    assert parameters["nominal"] == settings(searched)["h2o@0.33"]["nominal"]
    ok("score", "--config", str(config), cwd=searched)
    long = pd.read_csv(searched / "results/tiny/long.csv")
    assert set(long.loc[long["entry"] == "h2o@0.33", "nominal"]) == {parameters["nominal"]}
    reached = {name: found["reached"] for name, found in settings(searched).items()}
    for name, rows in long.groupby("entry"):
        if "@" in name:
            assert set(rows["b_development"]) == {reached[name]}
        else:  # without a knob: nothing to search
            assert rows["b_development"].isna().all()


def test_a_search_is_not_repeated(searched: Path, config: Path) -> None:
    path = searched / "results/tiny/budgets/h2o@0.20.json"
    before = path.stat().st_mtime_ns
    text = ok("budget", "--config", str(config), "--methods", "h2o", cwd=searched)
    assert path.stat().st_mtime_ns == before
    assert text.count("met, 6 rows") == 3


def test_steps_in_the_wrong_order_are_one_line(config: Path, tmp_path: Path) -> None:
    ok("splits", "--config", str(config), cwd=tmp_path)
    arguments = ["--config", str(config)]
    snapkv = [*arguments, "--methods", "snapkv"]
    assert "run pask budget" in refused("evaluate", *snapkv, cwd=tmp_path)
    assert "dev.jsonl" in refused("budget", *snapkv, cwd=tmp_path)
    assert "run pask calibrate" in refused("budget", *arguments, cwd=tmp_path)


STALE = {
    "kv_dtype": ["engine.kv_dtype=float32"],
    "rows": ["data.dev_sample={multiple: 2}"],
    "prompt": ["model.prompt=both_examples"],
    "answer_form": ["model.answer_form=tool_call"],
    "expected_new_tokens": ["model.expected_new_tokens.live=25"],
    "max_new_tokens": ["decode.max_new_tokens=25"],
    "tolerance": ["budget.tolerance=0.01"],
    "params": ["methods=[{name: h2o, budgets: [0.2], params: {heavy_share: 0.4}}]"],
}


@pytest.mark.parametrize("what", STALE)
def test_a_knob_of_something_else_is_refused(searched: Path, config: Path, what: str) -> None:
    arguments = ["--config", str(config), "--methods", "h2o", "--set", *STALE[what]]
    line = refused("evaluate", *arguments, cwd=searched)
    assert f"h2o@0.20.json: the knob was searched under another {what}" in line


@pytest.mark.parametrize(
    "text",
    ["null", "[]", '{"decided_by": 3}', '{"decided_by": {}, "status": "met", "nominal": null}'],
)
def test_a_damaged_file_is_one_line(searched: Path, config: Path, text: str) -> None:
    path = searched / "results/tiny/budgets/snapkv@0.33.json"
    whole = path.read_text()
    if text.startswith('{"decided_by": {}'):
        text = json.dumps(json.loads(whole) | {"nominal": None})
    try:
        path.write_text(text)
        line = refused("evaluate", "--config", str(config), "--methods", "snapkv", cwd=searched)
        assert "snapkv@0.33.json: the file is damaged" in line
    finally:
        path.write_text(whole)


def test_a_torn_file_is_searched_again(searched: Path, config: Path) -> None:
    path = searched / "results/tiny/budgets/h2o@0.50.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    arguments = ["--config", str(config), "--methods", "h2o"]
    assert "h2o@0.50.json: the file is damaged" in refused("evaluate", *arguments, cwd=searched)
    ok("budget", *arguments, cwd=searched)
    assert path.read_text() == whole


@pytest.mark.parametrize("budget", ["0", "-0.1", "1.5"])
def test_a_budget_that_is_none_is_one_line(config: Path, tmp_path: Path, budget: str) -> None:
    override = f"methods=[{{name: snapkv, budgets: [{budget}]}}]"
    line = refused("splits", "--config", str(config), "--set", override, cwd=tmp_path)
    assert "methods.0.budgets.0" in line


def test_loading_a_config_costs_no_search(config: Path) -> None:
    names = [entry.name for entry in load(config).entries]
    assert names[:2] == ["full", "snapkv@0.20"]
    assert names[-1] == "uniform_int4"
