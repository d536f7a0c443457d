"""PASK from Full KV's answers to a scored evaluation, by its commands, on a tiny random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from pask.calibration.measure_row import RowMeasurer
from pask.engine.replay import Replayer
from pask.methods.levels import Level
from pask.policy.policy import Policy, read_policy
from tests.cpu.test_evaluation import ok, refused
from tests.cpu.tiny import tiny_folder

CAL = {"simple_python": 2, "live_simple": 1}
DEV = {"multiple": 2, "live_simple": 1}
POLICY = "results/tiny/policies/pask.json"
TARGET = 0.6


def model_folder(folder: Path, seed: int) -> Path:
    return tiny_folder(folder, "llama", seed, head_dim=32, max_position_embeddings=16384)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model_folder(tmp_path_factory.mktemp("model"), 4)),
            "prompt": "format_last",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 24, "live": 24},
        },
        "data": {"cal_sample": CAL, "dev_sample": DEV, "sample": {"parallel": 2}},
        "decode": {"max_new_tokens": 24},
        "engine": {"max_batch": 16, "shards": 2},
        "structure": {"layer_groups": 2},
        "methods": [
            {"name": "full"},
            {"name": "pask", "budgets": [TARGET], "params": {"recent": 1, "candidates": 4}},
        ],
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def both_shards(*command: str, cwd: Path) -> None:
    for shard in ("1/2", "2/2"):
        ok(*command, "--shard", shard, cwd=cwd)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    """A folder in which every command of the way has run."""
    cwd, given = tmp_path_factory.mktemp("done"), ("--config", str(config))
    ok("splits", *given, cwd=cwd)
    for part in ("cal", "dev"):
        ok("trajectories", *given, "--part", part, cwd=cwd)
    both_shards("evidence", *given, cwd=cwd)
    both_shards("scan", *given, cwd=cwd)
    assert ok("policy", "make", *given, cwd=cwd) == f"{POLICY}\n"
    ok("budget", *given, cwd=cwd)
    both_shards("evaluate", *given, cwd=cwd)
    ok("score", *given, cwd=cwd)
    return cwd


@pytest.fixture
def copied(done: Path, tmp_path: Path) -> Path:
    """The same files, to be spoiled."""
    shutil.copytree(done / "results", tmp_path / "results")
    return tmp_path


@pytest.fixture(scope="module")
def policy(done: Path) -> Policy:
    return read_policy(done / POLICY)


def lines_of(cwd: Path, kind: str) -> list[dict[str, Any]]:
    paths = [cwd / f"results/tiny/{kind}/{shard}-of-2.jsonl" for shard in (1, 2)]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def part_of(cwd: Path, part: str, sample: dict[str, int]) -> list[str]:
    """The first rows of each category of a part, from the split file."""
    splits = json.loads((cwd / "results/tiny/splits.json").read_text())
    return [
        i for category, count in sample.items() for i in splits["parts"][part][category][:count]
    ]


def test_a_policy_is_of_all_calibration_rows(done: Path, policy: Policy) -> None:
    measured = lines_of(done, "evidence")
    assert sorted(line["id"] for line in measured) == sorted(part_of(done, "cal", CAL))
    assert policy.prompt is not None
    assert policy.decode.evidence.rows == policy.prompt.evidence.rows == len(measured) == 3
    assert policy.calibration["answer_tokens"] == sum(len(line["names"]) for line in measured)
    tokens = sum(q.tokens for q in policy.decode.evidence.buckets if q.bucket.group == 0)
    assert 3 * tokens == pytest.approx(policy.calibration["answer_tokens"])
    names = {name for line in measured for name in line["names"]}
    assert {q.bucket.name for q in policy.decode.evidence.buckets} == names == set(policy.reserve)
    assert any(q.distortion[Level.RELEASE] > 0 for q in policy.decode.evidence.buckets)
    assert (policy.layers, policy.layer_groups, policy.recent) == (2, (0, 1), 1)


def test_every_candidate_was_tried_on_all_development_rows(done: Path, policy: Policy) -> None:
    scan = lines_of(done, "scan")
    assert sorted(line["id"] for line in scan) == sorted(part_of(done, "dev", DEV))
    (keys,) = {tuple(sorted(line["results"])) for line in scan}
    assert policy.prompt is not None
    for side in (policy.decode, policy.prompt):
        assert {seen.rows for seen in side.candidates} == {3}
        # Three pairs of thresholds, each with its floors and everything at HIGH.
        assert len({seen.tau for seen in side.candidates}) == 3
        costs = [seen.cost for seen in side.candidates]
        assert max(costs) == pytest.approx(1.0)
        whole = [seen for seen in side.candidates if seen.cost == max(costs)]
        assert {seen.failures for seen in whole} == {whole[0].reference_failures}
        (taken,) = (s for s in side.candidates if (s.tau, s.steps) == (side.tau, side.steps))
        assert taken.cost == min(s.cost for s in side.candidates if s.increase <= side.alpha)
    assert 4 <= len(keys) <= len(policy.decode.candidates) + len(policy.prompt.candidates)
    changed = [one["changed"] for line in scan for one in line["results"].values()]
    assert any(changed)
    assert not all(changed)


def test_it_is_shown_as_a_table(done: Path, policy: Policy) -> None:
    text = ok("policy", "show", POLICY, cwd=done)
    assert f"policy {policy.digest[:16]}, schema 2" in text
    assert "decode side, levels R,L4,H, groups of 1, 1 layers" in text
    assert "prompt side, levels R,L4,H" in text
    assert "on 3 development rows: " in text
    for found in policy.decode.evidence.buckets:
        assert f"  {found.bucket.name} | {found.bucket.group} " in text


def test_the_target_is_met_and_said(done: Path, policy: Policy) -> None:
    setting = json.loads((done / f"results/tiny/budgets/pask@{TARGET:.2f}.json").read_text())
    assert setting["status"] == "met"
    assert abs(setting["reached"] - TARGET) <= 0.005
    long = pd.read_csv(done / "results/tiny/long.csv")
    ours = long[long["entry"] == f"pask@{TARGET:.2f}"]
    assert list(ours["id"]) == list(long[long["entry"] == "full"]["id"])
    assert len(ours) == 2
    assert set(ours["b_development"]) == {setting["reached"]}
    assert set(ours["nominal"]) == {setting["nominal"]}
    manifest = done / f"results/tiny/predictions/pask@{TARGET:.2f}/1-of-2.manifest.json"
    parameters = json.loads(manifest.read_text())["decided_by"]["parameters"]
    assert parameters["policy"] == policy.digest


def test_a_second_time_nothing_is_computed(
    copied: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **more: Any) -> None:
        raise AssertionError("a row was measured again")

    monkeypatch.setattr(RowMeasurer, "measure", never)
    monkeypatch.setattr(Replayer, "trace", never)
    files = sorted((copied / "results").rglob("*"))
    before = {path: path.read_bytes() for path in files if path.suffix in (".jsonl", ".csv")}
    policy, given = (copied / POLICY).read_bytes(), ("--config", str(config))
    both_shards("evidence", *given, cwd=copied)
    both_shards("scan", *given, cwd=copied)
    ok("policy", "make", *given, cwd=copied)
    assert (copied / POLICY).read_bytes() == policy
    settings = copied / f"results/tiny/budgets/pask@{TARGET:.2f}.json"
    searched = settings.stat().st_mtime_ns
    ok("budget", *given, cwd=copied)
    assert settings.stat().st_mtime_ns == searched
    both_shards("evaluate", *given, cwd=copied)
    for path in (copied / "results/tiny").rglob("*.manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest.get("items_computed_now", 0) == 0 or "trajectories" in str(path), path
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("command", ["budget", "evaluate"])
def test_a_truncated_policy_is_one_line(copied: Path, config: Path, command: str) -> None:
    path = copied / POLICY
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    line = refused(command, "--config", str(config), cwd=copied)
    assert "policies/pask.json: the file holds no whole policy" in line
    assert "policies/pask.json: the file holds no whole policy" in refused(
        "policy", "show", POLICY, cwd=copied
    )


def test_a_policy_that_was_changed_by_hand_is_one_line(copied: Path, config: Path) -> None:
    path = copied / POLICY
    changed = json.loads(path.read_text())
    changed["decode"]["steps"] = 0 if changed["decode"]["steps"] else 1
    path.write_text(json.dumps(changed))
    line = refused("evaluate", "--config", str(config), cwd=copied)
    assert "policies/pask.json: the policy was changed" in line


def test_another_model_is_refused(done: Path, config: Path, tmp_path: Path) -> None:
    other = f"model.source={model_folder(tmp_path, 5)}"
    given = ("--config", str(config), "--set", other)
    line = refused("evaluate", *given, cwd=done)
    assert "policies/pask.json: the policy was made for another model and tokenizer " in line
    assert "evidence" in (line := refused("policy", "make", *given, cwd=done))
    assert "measured under another model" in line


def test_a_wrong_order_is_one_line(done: Path, copied: Path, config: Path) -> None:
    given = ("--config", str(config))
    (copied / POLICY).unlink()
    assert "there is no such policy" in refused("budget", *given, cwd=copied)
    (copied / "results/tiny/scan/2-of-2.jsonl").unlink()
    assert "run pask scan" in refused("policy", "make", *given, cwd=copied)
    (copied / "results/tiny/evidence/2-of-2.jsonl").unlink()
    assert "run pask evidence" in refused("scan", *given, cwd=copied)
