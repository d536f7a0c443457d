"""vLLM and our engine agree: the same tokens, and log-probabilities to 1e-4, in fp32.

They share xgrammar and the weights' file, and nothing of the computation. vLLM needs an environment
of its own (README.md); elsewhere these tests are skipped.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xgrammar as xgr
import yaml

from pask.bfcl.answers import ANSWER_FORMS
from pask.bfcl.data import load_rows
from pask.bfcl.request import Request, RequestBuilder
from pask.config import RunConfig, load
from pask.engine.decode import generate
from pask.engine.generation import Limits
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.engine.trajectories import read
from pask.errors import PaskError
from pask.evaluation.trajectories import collect, header_of
from tests.cpu.tiny import VOCAB_SIZE, tiny_folder
from tests.cpu.toys import SomeRequest, full, toy_requests

pytest.importorskip("vllm", reason="vLLM is not in this environment (see README.md)")

from pask.peers.vllm import PeerAnswer, VllmEngine

pytestmark = pytest.mark.slow

NEW_TOKENS = 40
LONGEST = 4096
ROWS = ("simple_python_3", "parallel_multiple_5", "live_multiple_17-4-9")


@pytest.fixture(scope="module", autouse=True)
def _settings() -> Iterator[None]:
    """Without torch.compile, which vLLM would use for the rank of a log-probability, in 20 s."""
    disabled = torch._dynamo.config.disable
    torch._dynamo.config.disable = True
    before = dict(os.environ)
    yield
    torch._dynamo.config.disable = disabled
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """head_dim 32 is the least that vLLM takes; two stop tokens, as chat models have."""
    folder = tiny_folder(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        seed=2,
        head_dim=32,
        max_position_embeddings=LONGEST,
        eos_token_id=[2, 0],
    )
    loaded = load_model(str(folder))
    assert loaded.stop_token_ids == (0, 2)
    return loaded


@pytest.fixture(scope="module")
def vllm(model: LoadedModel) -> Iterator[VllmEngine]:
    info = tokenizer_info(model)
    with VllmEngine(model.folder, model.layout, info, longest=LONGEST, max_batch=4) as engine:
        assert (engine.dtype, engine.kv_dtype) == ("float32", "float32")
        yield engine


def check_greedy(model: LoadedModel, request: SomeRequest | Request, answer: PeerAnswer) -> None:
    """Every choice of vLLM's is our engine's, by one pass over the whole text without a KV store.

    If each token is the best legal one after those before it, then choosing one after the other
    gives the same tokens. The stop token is a choice too.
    """
    tokens, prompt = list(answer.token_ids), len(request.prompt_ids)
    rows = model.transformer.all_logits([*request.prompt_ids, *tokens])[prompt - 1 :].double()
    matcher = None if request.grammar is None else xgr.GrammarMatcher(request.grammar)
    mask = xgr.allocate_token_bitmask(1, VOCAB_SIZE)
    assert answer.finish == ("length" if len(tokens) == NEW_TOKENS else "stop")
    chosen = tokens if answer.finish == "length" else [*tokens, None]
    for number, (token, row) in enumerate(zip(chosen, rows, strict=False)):
        if matcher is not None:
            matcher.fill_next_token_bitmask(mask)
            words = mask[0].tolist()
            illegal = [i for i in range(VOCAB_SIZE) if not words[i // 32] >> (i % 32) & 1]
            row[illegal] = -math.inf
        best, second = row.topk(2).values.tolist()
        assert best - second > 1e-4, "two tokens nearly tie: choose another seed"
        if token is None:
            assert int(row.argmax()) in model.stop_token_ids
            continue
        assert int(row.argmax()) == token, (request.id, number)
        assert answer.logprobs[number] == pytest.approx(float(row.log_softmax(0)[token]), abs=1e-4)
        assert matcher is None or matcher.accept_token(token)
    assert len(answer.logprobs) == len(tokens)


def check_all(
    model: LoadedModel, requests: Sequence[SomeRequest | Request], vllm: VllmEngine
) -> dict[str, PeerAnswer]:
    """Ask vLLM, compare every answer, and give them back by request."""
    answers = vllm.generate(requests, Limits(NEW_TOKENS), logprobs=True)
    found = {answer.request_id: answer for answer in answers}
    assert found.keys() == {request.id for request in requests}
    for request in requests:
        check_greedy(model, request, found[request.id])
    return found


def check_as_decoded(
    model: LoadedModel, requests: Sequence[SomeRequest | Request], found: dict[str, PeerAnswer]
) -> None:
    """The answers are those of our decoding, token by token over its KV store."""
    for ours in generate(model, full(requests), Limits(NEW_TOKENS), kv_dtype=torch.float32):
        theirs = found[ours.request_id]
        assert (ours.token_ids, ours.finish) == (theirs.token_ids, theirs.finish)


def test_free_running(model: LoadedModel, vllm: VllmEngine) -> None:
    """Without a grammar; more requests than the batch holds, so that some wait for others."""
    check_all(model, [SomeRequest(r.id, r.prompt_ids, None) for r in toy_requests(model)], vllm)


def test_under_a_grammar(model: LoadedModel, vllm: VllmEngine) -> None:
    """Calls, short answers, and answers whose first token the grammar leaves no choice of."""
    forced = xgr.GrammarCompiler(tokenizer_info(model)).compile_grammar('root ::= "~" [a-z]+')
    requests = toy_requests(model)
    requests += [replace(r, id=f"~{r.id}", grammar=forced) for r in requests[:4]]
    found = check_all(model, requests, vllm)
    assert {answer.finish for answer in found.values()} == {"stop", "length"}
    check_as_decoded(model, requests, found)


@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_function_calls(model: LoadedModel, vllm: VllmEngine, form: str) -> None:
    builder = RequestBuilder(model.tokenizer, tokenizer_info(model), "format_last", form)
    requests = [builder.build(load_rows()[row_id]) for row_id in ROWS]
    check_as_decoded(model, requests, check_all(model, requests, vllm))


def test_control_tokens_are_no_text_and_every_stop_token_ends(
    model: LoadedModel, vllm: VllmEngine
) -> None:
    """After prompts that the model would go on from with a control token, under a grammar of
    nearly any text: the two stop tokens end it, and the third is not legal."""
    anything = xgr.GrammarCompiler(tokenizer_info(model)).compile_grammar("root ::= [^~]*")
    prompts: dict[int, tuple[int, ...]] = {}
    for seed in range(20):
        draw = random.Random(seed)
        text = tuple(draw.choice((0, 1, 2, draw.randrange(3, 440))) for _ in range(2000))
        best = model.transformer.all_logits(text).argmax(-1).tolist()
        prompts |= {token: text[: best.index(token) + 1] for token in (0, 1, 2) if token in best}
    requests = [SomeRequest(f"a{token}", prompt, anything) for token, prompt in prompts.items()]
    found = check_all(model, requests, vllm)
    assert (found["a0"].token_ids, found["a0"].finish) == ((), "stop")
    assert (found["a2"].token_ids, found["a2"].finish) == ((), "stop")
    assert found["a1"].token_ids[0] > 2


def test_a_request_that_does_not_fit_is_refused_and_the_next_one_answered(
    model: LoadedModel, vllm: VllmEngine
) -> None:
    short = toy_requests(model)[0]
    long = SomeRequest("long", (3,) * (LONGEST + 1), None)
    with pytest.raises(PaskError, match="long: vLLM refuses the request"):
        list(vllm.generate([short, long], Limits(4)))
    assert [a.request_id for a in vllm.generate([short], Limits(4))] == [short.id]


def run_config(folder: Path, model: LoadedModel, form: str) -> RunConfig:
    raw = {
        "run": f"tiny-{form}",
        "model": {
            "name": "tiny",
            "source": str(model.folder),
            "prompt": "format_last",
            "answer_form": form,
            "expected_new_tokens": {"nonlive": 24, "live": 24},
        },
        "decode": {"max_new_tokens": NEW_TOKENS},
        "engine": {"max_batch": 4, "kv_dtype": "float32"},
        "methods": [{"name": "full"}],
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load(path)


def test_the_files_of_both_engines_hold_the_same_trajectories(
    model: LoadedModel, tmp_path: Path
) -> None:
    config = run_config(tmp_path, model, "json_list")
    expected = header_of(config, model.digest, model.layout.vocab_size)
    with contextlib.chdir(tmp_path):
        ours = read(collect(config, "cal", "pask", sample=1), expected)
        theirs = read(collect(config, "cal", "vllm", sample=1), expected)
    assert (ours.maker.engine, theirs.maker.engine) == ("pask", "vllm")
    assert theirs.maker.dtype == theirs.maker.kv_dtype == "float32"
    assert len(ours.by_id) == 8
    assert list(theirs.by_id.items()) == list(ours.by_id.items())
