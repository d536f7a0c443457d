"""Measuring calibration rows end to end on a tiny random model: lines, kills, shards, refusals."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pask.bfcl.data import load_rows
from pask.bfcl.splits import build_splits
from pask.calibration import side_by_side
from pask.calibration.gather import gather
from pask.calibration.intervention import Interventions
from pask.calibration.measure_row import RowMeasurer
from pask.calibration.rows import evidence_files, measure_rows, read_evidence
from pask.calibration.run import calibration_rows
from pask.calibration.side_by_side import Begun
from pask.config import RunConfig, load
from pask.engine.loading import load_model
from pask.errors import PaskError
from pask.evaluation.judge import judge
from pask.evaluation.keys import splits_file
from pask.evaluation.trajectories import collect, trajectory_file
from pask.policy.actions import Ladder
from tests.cpu.tiny import tiny_folder

SAMPLE = {"simple_python": 2, "live_simple": 1}
TRIED = Interventions(recent=2, ladder=Ladder.parse("R,L4,H"), sinks=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"head_dim": 32, "max_position_embeddings": 16384}
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama", seed=4, **shape)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> RunConfig:
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model),
            "prompt": "format_last",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 20, "live": 20},
        },
        "data": {"cal_sample": SAMPLE},
        "decode": {"max_new_tokens": 20},
        "structure": {"layer_groups": 2},
        "methods": [{"name": "full"}],
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load(path)


@pytest.fixture(scope="module")
def model_digest(model: Path) -> str:
    return load_model(str(model)).digest


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Path:
    """A folder with the split and Full KV's answers."""
    folder = tmp_path_factory.mktemp("asked")
    with contextlib.chdir(folder):
        build_splits(load_rows(), "paper", config.data.seed).write(splits_file(config))
        collect(config, "cal")
    return folder


def prepare(folder: Path, asked: Path, config: RunConfig) -> None:
    for path in (splits_file(config), trajectory_file(config, "cal")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(asked / path, folder / path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, asked: Path, config: RunConfig) -> Path:
    """A folder in which all rows were measured, undisturbed, as one shard."""
    folder = tmp_path_factory.mktemp("made")
    prepare(folder, asked, config)
    with contextlib.chdir(folder):
        path = measure_rows(config, TRIED)
        assert path == Path("results/tiny/evidence/1-of-1.jsonl")
    return folder


@pytest.fixture
def there(tmp_path: Path, asked: Path, config: RunConfig) -> Iterator[Path]:
    prepare(tmp_path, asked, config)
    with contextlib.chdir(tmp_path):
        yield tmp_path


def lines_of(folder: Path, name: str = "1-of-1") -> list[dict[str, Any]]:
    text = (folder / f"results/tiny/evidence/{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_has_everything_of_its_row(made: Path, config: RunConfig) -> None:
    rows = load_rows()
    with contextlib.chdir(made):
        ids = calibration_rows(config)
        answers = [
            json.loads(line) for line in trajectory_file(config, "cal").read_text().splitlines()[1:]
        ]
    lines = lines_of(made)
    assert [line["id"] for line in lines] == ids == [answer["id"] for answer in answers]
    tokenizer = load_model(config.model.source).tokenizer
    for line, answer in zip(lines, answers, strict=True):
        row = rows[line["id"]]
        assert (line["category"], line["cluster"]) == (row.category, row.cluster)
        tokens = answer["token_ids"]
        cut_off = answer["finish"] == "length"
        assert line["fed"] == len(line["names"]) == len(tokens) - cut_off
        assert line["prompt_tokens"] == answer["prompt_tokens"]
        assert sum(line["labels"].values()) == line["prompt_tokens"] - 4 - 1
        record = {"finish": answer["finish"], "text": tokenizer.decode(tokens)}
        assert line["reference_correct"] == judge(row, record, "json_list").correct

        def key(one: dict[str, Any]) -> tuple[Any, ...]:
            return one["side"], one["bucket"], one["group"], one["level"]

        expected = {
            (side, name, group, level): tokens
            for side, counts in (("decode", Counter(line["names"])), ("prompt", line["labels"]))
            for name, tokens in counts.items()
            for group in (0, 1)
            for level in ("R", "L4")
        }
        for kind in ("outcomes", "distortions"):
            counted = {key(one): one["tokens"] for one in line[kind]}
            assert len(line[kind]) == len(counted)
            assert counted == expected
        assert all(one["total"] > 0 for one in line["distortions"] if one["positions"])
    assert any(one["changed"] for line in lines for one in line["outcomes"])


def test_a_kill_loses_the_row_in_hand_alone(
    made: Path, there: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, asked_for = RowMeasurer._begin, [0]

    def killed(self: RowMeasurer, *arguments: Any) -> Begun:
        asked_for[0] += 1
        if asked_for[0] == 3:
            raise KeyboardInterrupt
        return begin(self, *arguments)

    monkeypatch.setattr(side_by_side, "AT_ONCE", 1)
    monkeypatch.setattr(RowMeasurer, "_begin", killed)
    with pytest.raises(KeyboardInterrupt):
        measure_rows(config, TRIED)
    (part,) = there.glob("results/tiny/evidence/*/1-of-1.jsonl")
    assert not (there / "results/tiny/evidence/1-of-1.jsonl").exists()
    assert part.read_bytes().count(b"\n") == 2
    with part.open("ab") as out:  # in the middle of a write
        out.write(b'{"category": "simple_py')
    path = measure_rows(config, TRIED, threads=2)
    assert asked_for == [4]  # the two finished rows were not measured again
    assert path.read_bytes() == (made / path).read_bytes()
    manifest = json.loads(path.with_suffix(".manifest.json").read_text())
    assert (manifest["items"], manifest["items_computed_now"]) == (3, 1)
    before = path.read_bytes()
    measure_rows(config, TRIED)
    assert asked_for == [4]
    assert path.read_bytes() == before


def test_shards_and_batches_change_nothing(
    made: Path, there: Path, config: RunConfig, model_digest: str
) -> None:
    other = replace(config, engine=replace(config.engine, max_batch=5))
    for shard in (0, 1):
        measure_rows(other, TRIED, shard=shard, shards=2)
    whole = lines_of(made)
    assert lines_of(there, "1-of-2") == whole[::2]
    assert lines_of(there, "2-of-2") == whole[1::2]
    assert read_evidence(config, TRIED, model_digest, shards=2) == whole


def test_the_lines_give_evidence(made: Path, config: RunConfig, model_digest: str) -> None:
    with contextlib.chdir(made):
        lines = read_evidence(config, TRIED, model_digest, shards=1)
    sides = gather(lines, ladder=TRIED.ladder, groups=(1, 1), coarsening="role_choice_next")
    for side, names in zip(sides, ("names", "labels"), strict=True):
        assert side.rows == 3
        assert {found.bucket.name for found in side.buckets} == {n for x in lines for n in x[names]}
        assert sum(found.tokens for found in side.buckets) * 3 / 2 == pytest.approx(
            sum(line["fed"] for line in lines)
            if side.side == "decode"
            else sum(line["prompt_tokens"] - 5 for line in lines)
        )


def test_what_was_measured_for_something_else_is_told(
    made: Path, config: RunConfig, model_digest: str
) -> None:
    def refused(
        match: str, config: RunConfig = config, tried: Interventions = TRIED, model: str = ""
    ) -> None:
        with pytest.raises(PaskError, match=match):
            read_evidence(config, tried, model or model_digest, shards=1)

    with contextlib.chdir(made):
        refused("under another ladder;", tried=replace(TRIED, ladder=Ladder.parse("R,H")))
        refused("under another recent, sinks;", tried=Interventions(3, TRIED.ladder, 3))
        refused("under another model;", model="another")
        structure = replace(config.structure, coarsening="role")
        refused("under another coarsening;", replace(config, structure=structure))
        refused("under another max_new_tokens;", replace(config, max_new_tokens=21))
        more = replace(config, data=replace(config.data, cal_sample={"simple_python": 3}))
        refused("1 of 3 rows are not measured, 1 others are", more)


def test_what_decides_a_line_and_what_does_not(made: Path, config: RunConfig) -> None:
    def key(config: RunConfig = config, tried: Interventions = TRIED) -> str:
        return json.dumps(evidence_files(config, tried, "model").decided_by, sort_keys=True)

    with contextlib.chdir(made):
        fewer = replace(config, data=replace(config.data, cal_sample={"simple_python": 1}))
        small = replace(config, engine=replace(config.engine, max_batch=1, shards=7))
        assert key() == key(fewer) == key(small)
        groups = replace(config, structure=replace(config.structure, layer_groups=(0, 1)))
        others = [
            key(groups),
            key(tried=replace(TRIED, recent=9)),
            key(tried=replace(TRIED, sinks=0)),
            key(tried=replace(TRIED, ladder=Ladder.parse("R,L2,L4,H"))),
        ]
        assert len({key(), *others}) == 5


def test_without_answers_under_full_kv(there: Path, config: RunConfig) -> None:
    trajectory_file(config, "cal").unlink()
    with pytest.raises(PaskError, match=r"cal\.jsonl: cannot read the trajectories.*collect them"):
        measure_rows(config, TRIED)


def test_nothing_measured_yet(there: Path, config: RunConfig, model_digest: str) -> None:
    with pytest.raises(PaskError, match=r"1-of-1\.jsonl: nothing was measured yet; run pask evid"):
        read_evidence(config, TRIED, model_digest, shards=1)
