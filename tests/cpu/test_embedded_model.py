"""The real pretrained default, on real rows, against transformers and a plain decoding loop."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from baselines.snapkv import SnapKV
from pask.bench.plain import PlainLoop
from pask.bfcl.answers import parse
from pask.bfcl.data import load_rows
from pask.bfcl.request import Request, RequestBuilder
from pask.config import load as load_config
from pask.engine.decode import generate
from pask.engine.generation import Generation, Limits, Task
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.evaluation.model import load
from pask.methods.full import FullKV
from pask.paths import CONFIGS
from pask.structure.tracker import Tracker

ROWS = ("simple_python_286", "multiple_104", "parallel_3")
LIMIT = 48


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(load_config(CONFIGS / "smollm2-135m-sample.yaml"))


@pytest.fixture(scope="module")
def reference(model: LoadedModel) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[Request]:
    builder = RequestBuilder(model.tokenizer, tokenizer_info(model), "one_example", "json_list")
    rows = load_rows()
    return [builder.build(rows[row_id]) for row_id in ROWS]


@pytest.fixture(scope="module")
def answers(model: LoadedModel, requests: list[Request]) -> dict[tuple[str, str], Generation]:
    """Everything below from one batch: Full KV, SnapKV with nothing and with much to drop."""
    methods = (
        ("full", FullKV()),
        ("snapkv@1.00", SnapKV(budget=1.0)),
        ("snapkv@0.20", SnapKV(budget=0.2)),
    )
    tasks = [Task(request, methods) for request in requests]
    done = generate(model, tasks, Limits(LIMIT), kv_dtype=torch.float32)
    return {(g.request_id, g.entry): g for g in done}


def test_logits_are_those_of_transformers(
    model: LoadedModel, reference: PreTrainedModel, requests: list[Request]
) -> None:
    ids = list(requests[0].prompt_ids)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(model.transformer.all_logits(ids), expected, rtol=1e-4, atol=1e-3)


def test_full_kv_answers_as_the_plain_loop_does(
    model: LoadedModel,
    requests: list[Request],
    answers: dict[tuple[str, str], Generation],
) -> None:
    plain = PlainLoop(model.folder)
    for request in requests:
        expected = plain.answer(request, FullKV(), 0, LIMIT)
        assert answers[request.id, "full"].token_ids == expected


def test_with_nothing_to_drop_snapkv_is_full_kv(
    answers: dict[tuple[str, str], Generation],
) -> None:
    for row_id in ROWS:
        full, all_kept = answers[row_id, "full"], answers[row_id, "snapkv@1.00"]
        assert all_kept.token_ids == full.token_ids
        assert all_kept.bytes == full.bytes


def test_snapkv_holds_the_bytes_of_its_formula(
    model: LoadedModel, answers: dict[tuple[str, str], Generation]
) -> None:
    layout = model.layout
    slot = 2 * layout.kv_heads * layout.head_dim * 4 * layout.layers  # fp32, all layers
    for row_id in ROWS:
        answer = answers[row_id, "snapkv@0.20"]
        # No answer length is expected here; of a page of 16 slots 7.5 are free on average.
        kept = round(0.2 * answer.prompt_tokens - 0.8 * 7.5)
        assert answer.bytes.prompt == kept * slot
        assert answer.bytes.full_prompt == answer.prompt_tokens * slot


def test_an_answer_is_calls_of_the_rows_functions(
    answers: dict[tuple[str, str], Generation],
) -> None:
    rows = load_rows()
    finished = [g for g in answers.values() if g.finish == "stop"]
    assert finished
    for answer in finished:
        known = {function["name"] for function in rows[answer.request_id].functions}
        assert {name for call in parse(answer.text, "json_list") for name in call} <= known


def test_every_decoded_token_has_its_tag(
    model: LoadedModel, requests: list[Request], answers: dict[tuple[str, str], Generation]
) -> None:
    vocabulary = tokenizer_info(model).decoded_vocab
    grammars = {request.id: request.tag_grammar for request in requests}
    for answer in answers.values():
        tracker = Tracker(grammars[answer.request_id])
        again = tuple(tracker.accept(vocabulary[token]) for token in answer.token_ids)
        assert answer.tags == again
        assert len(answer.tags) == answer.new_tokens > 0
        assert tracker.can_end == (answer.finish == "stop")
