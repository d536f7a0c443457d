"""The calibration step end to end on a tiny random model: what is written, read and refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from baselines.triaxialkv import TriAxialRLH, tokens_by_tag
from pask.bfcl.data import load_rows
from pask.bfcl.request import RequestBuilder
from pask.bfcl.splits import Splits, build_splits
from pask.calibration.run import calibrate, calibration_file, calibration_rows, read_calibration
from pask.config import RunConfig, load
from pask.engine.loading import load_model, tokenizer_info
from pask.errors import PaskError
from pask.evaluation.keys import splits_file
from pask.methods.contract import PromptInfo
from pask.methods.registry import make_method
from tests.cpu.tiny import tiny_folder

SAMPLE = {"simple_python": 2, "live_simple": 1}
FAMILIES = ["triaxialkv", "triaxialkv-whole", "triaxialkv_rlh"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_folder(folder, "llama", head_dim=32, max_position_embeddings=16384)


def config_of(folder: Path, model: Path, **sections: Any) -> RunConfig:
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model),
            "prompt": "one_example",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 24, "live": 24},
        },
        "data": {"cal_sample": SAMPLE},
        "methods": [
            {"name": "full"},
            {"name": "triaxialkv", "budgets": [0.25, 0.3]},
            {
                "name": "triaxialkv",
                "variant": "whole",
                "budgets": [0.25],
                "params": {"split_marginal": False},
            },
            {"name": "triaxialkv_rlh", "budgets": [0.33]},
        ],
    } | sections
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load(path)


@cache
def split_of(seed: int) -> Splits:
    return build_splits(load_rows(), "paper", seed)


@contextlib.contextmanager
def folder_of(folder: Path, config: RunConfig) -> Iterator[None]:
    """The working folder of a run, with its split file."""
    with contextlib.chdir(folder):
        split_of(config.data.seed).write(splits_file(config))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: Path) -> RunConfig:
    return config_of(tmp_path_factory.mktemp("config"), model)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> bytes:
    """The file of an undisturbed calibration."""
    with folder_of(tmp_path_factory.mktemp("made"), config):
        path = calibrate(config)
        assert path == calibration_file(config)
        return path.read_bytes()


@pytest.fixture
def there(tmp_path: Path, config: RunConfig, made: bytes) -> Iterator[Path]:
    """In a folder with that file."""
    with folder_of(tmp_path, config):
        path = calibration_file(config)
        path.write_bytes(made)
        yield path


@pytest.fixture(scope="module")
def model_digest(model: Path) -> str:
    return load_model(str(model)).digest


def test_what_was_measured_is_what_is_read(
    there: Path, config: RunConfig, model_digest: str
) -> None:
    found = read_calibration(config, model_digest)
    assert sorted(found) == FAMILIES
    assert found["triaxialkv"] == found["triaxialkv-whole"]
    for family, fields in found.items():
        method = make_method(family.partition("-")[0], None, measured=fields)
        assert [row[0] for row in method.sensitivity] == [  # type: ignore[attr-defined]
            "current|delim",
            "current|user",
            "older|delim",
            "older|inst",
        ]
        for _, lowest, low4, count in fields["sensitivity"]:
            assert lowest > low4 > 0
            assert count > 0
    written = json.loads(there.read_text())
    assert sorted(written) == ["decided_by", "methods"]


def test_counts_are_the_medians_of_the_rows(
    there: Path, config: RunConfig, model: Path, model_digest: str
) -> None:
    rows, ids = load_rows(), calibration_rows(config)
    assert [row_id.rpartition("_")[0] for row_id in ids[:2]] == ["simple_python"] * 2
    assert len(ids) == 3
    loaded = load_model(str(model))
    builder = RequestBuilder(loaded.tokenizer, tokenizer_info(loaded), "one_example", "json_list")
    counts: dict[str, list[int]] = {}
    for row_id in ids:
        labels = builder.prompt(rows[row_id])[2]
        about = PromptInfo(len(labels), 2, 2, 2, 32, labels=labels)
        for tag, tokens in tokens_by_tag(about, "test").items():
            counts.setdefault(tag, []).append(len(tokens))
    found = read_calibration(config, model_digest)["triaxialkv_rlh"]["sensitivity"]
    assert {row[0]: row[3] for row in found} == {tag: sorted(n)[1] for tag, n in counts.items()}


def test_a_second_calibration_is_the_same_to_the_byte(
    tmp_path: Path, config: RunConfig, made: bytes
) -> None:
    with folder_of(tmp_path, config):
        path = calibrate(config)
        assert path is not None
        assert path.read_bytes() == made


def test_a_run_without_calibrated_methods_writes_nothing(tmp_path: Path, model: Path) -> None:
    plain = config_of(tmp_path, model, methods=[{"name": "full"}])
    with contextlib.chdir(tmp_path):
        assert calibrate(plain) is None
        assert read_calibration(plain, "") == {}
        assert not (tmp_path / "results").exists()


def test_nothing_calibrated_yet(tmp_path: Path, config: RunConfig) -> None:
    with contextlib.chdir(tmp_path), pytest.raises(PaskError, match="run pask calibrate"):
        read_calibration(config, "")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"decided_by": {}}',
        b'{"decided_by": {}, "methods": {"triaxialkv": []}}',
        b'{"decided_by": 3, "methods": {}}',
    ],
)
def test_a_damaged_file_is_told(
    there: Path, config: RunConfig, model_digest: str, content: bytes
) -> None:
    there.write_bytes(content)
    with pytest.raises(PaskError, match=r"calibration\.json: the file is damaged.*run pask"):
        read_calibration(config, model_digest)


def test_what_was_made_for_something_else_is_told(
    there: Path, config: RunConfig, model_digest: str
) -> None:
    with pytest.raises(PaskError, match="under another model;"):
        read_calibration(config, "another")
    other = replace(config, engine=replace(config.engine, kv_dtype="bfloat16"))
    with pytest.raises(PaskError, match="under another kv_dtype;"):
        read_calibration(other, model_digest)
    fewer = replace(config, data=replace(config.data, cal_sample={"simple_python": 1}))
    with pytest.raises(PaskError, match="under another rows;"):
        read_calibration(fewer, model_digest)
    entry = replace(config.entries[1], params={"split_marginal": False})
    changed = replace(config, entries=(config.entries[0], entry, *config.entries[3:]))
    with pytest.raises(PaskError, match="under another methods;"):
        read_calibration(changed, model_digest)


def test_what_does_not_decide_it_does_not_matter(
    there: Path, config: RunConfig, model_digest: str
) -> None:
    """Budgets, the rows that are evaluated, and how long answers may be."""
    entries = (config.entries[0], replace(config.entries[1], budget=0.2), *config.entries[2:])
    other = replace(
        config, entries=entries, max_new_tokens=5, data=replace(config.data, sample={"multiple": 1})
    )
    assert read_calibration(other, model_digest) == read_calibration(config, model_digest)


def test_a_model_whose_heads_cannot_be_quantised(tmp_path: Path) -> None:
    narrow = tiny_folder(tmp_path, "llama", max_position_embeddings=16384)
    with contextlib.chdir(tmp_path), pytest.raises(PaskError, match="head_dim 16 is no multiple"):
        calibrate(config_of(tmp_path, narrow))


def test_measured_fields_that_a_method_refuses_are_told(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (("older|inst", -1.0, 0.0, 1),)
    monkeypatch.setattr(TriAxialRLH, "calibrate", lambda *_: {"sensitivity": bad})
    own = replace(config, entries=config.entries[-1:])
    with folder_of(tmp_path, own):
        with pytest.raises(PaskError, match="triaxialkv_rlh: sensitivity of older"):
            calibrate(own)
        assert not calibration_file(own).exists()
