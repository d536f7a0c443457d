"""Constrained batched decoding against transformers, hand masks and itself in other company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xgrammar as xgr
from transformers import AutoModelForCausalLM

from pask.engine.constraint import LegalTokens, best
from pask.engine.decode import generate
from pask.engine.generation import Generation, Limits, Task
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.methods.full import FullKV
from tests.cpu.tiny import LAYOUTS, VOCAB_SIZE, tiny_folder
from tests.cpu.toys import EveryThird, SomeRequest, full, kept_tokens, toy_requests


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    return toy_requests(model)


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), request.param, seed=2)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


def greedy_by_hand(oracle: Any, request: SomeRequest, limit: int) -> tuple[list[int], str]:
    """Whole forward passes of transformers without a cache, one mask at a time."""
    matcher = xgr.GrammarMatcher(request.grammar)
    mask = xgr.allocate_token_bitmask(1, VOCAB_SIZE)
    ids: list[int] = []
    while len(ids) < limit:
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        legal = [t for t in range(VOCAB_SIZE) if words[t // 32] >> (t % 32) & 1]
        with torch.no_grad():
            logits = oracle(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, -1]
        token = max(legal, key=lambda t: (float(logits[t]), -t))
        assert matcher.accept_token(token)
        if matcher.is_terminated():
            return ids, "stop"
        ids.append(token)
    return ids, "length"


def test_full_kv_in_fp32_is_greedy_decoding_by_transformers(
    folder: Path, model: LoadedModel, requests: list[SomeRequest]
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = generate(model, full(requests), Limits(24), max_batch=5, kv_dtype=torch.float32)
    by_id = {g.request_id: g for g in found}
    assert len(by_id) == 16
    for request in requests:
        ids, finish = greedy_by_hand(oracle, request, 24)
        assert (list(by_id[request.id].token_ids), by_id[request.id].finish) == (ids, finish)
    assert {g.finish for g in by_id.values()} == {"stop", "length"}


def test_answers_do_not_depend_on_the_batch(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    methods = (("full", FullKV()), ("third", EveryThird()))

    def answers(order: Sequence[SomeRequest], max_batch: int) -> set[Generation]:
        found = list(
            generate(model, [Task(r, methods) for r in order], Limits(30), max_batch=max_batch)
        )
        assert len(found) == 2 * len(order)
        return set(found)

    alone = set().union(*(answers([request], 1) for request in requests))
    assert answers(requests, 4) == alone
    assert answers(requests[::-1], 16) == alone
    assert answers(random.Random(1).sample(requests, 16), 5) == alone


def test_the_order_of_answers_follows_from_the_input(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    runs = [list(generate(model, full(requests), Limits(12), max_batch=3)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_an_eviction_method_attends_over_what_it_kept_alone(
    folder: Path, model: LoadedModel, requests: list[SomeRequest]
) -> None:
    """Against transformers with every dropped (head, token) masked from the decoded rows."""
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    kv_heads, group = model.layout.kv_heads, model.layout.group_size
    differs = 0
    for request in requests[3:12]:
        (found,) = generate(
            model, [Task(request, (("t", EveryThird()),))], Limits(16), kv_dtype=torch.float32
        )
        prompt, ids = len(request.prompt_ids), [*request.prompt_ids, *found.token_ids]
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1).repeat(kv_heads, 1, 1)
        for head, kept in enumerate(kept_tokens(prompt, kv_heads).tolist()):
            dropped = sorted(set(range(prompt)) - set(kept))
            mask[head, prompt:, dropped] = float("-inf")
        mask = mask.repeat_interleave(group, dim=0)[None]
        with torch.no_grad():
            logits = oracle(torch.tensor([ids]), attention_mask=mask).logits[0]
            dense = oracle(torch.tensor([ids])).logits[0]
        differs += bool((logits[prompt:] - dense[prompt:]).abs().max() > 0.01)
        matcher = xgr.GrammarMatcher(request.grammar)
        for step, token in enumerate(found.token_ids):
            legal = LegalTokens([matcher], VOCAB_SIZE)
            row = logits[prompt - 1 + step].clone()
            assert best([legal.mask(0)], row[None], [request.id]) == [token]
            assert matcher.accept_token(token)
    assert differs == 9  # the masks do change what is computed


@pytest.mark.parametrize("start", ['"~"', '"~~ "', '""', "[a-z]"])
def test_a_forced_beginning_is_read_before_the_first_choice(
    folder: Path, model: LoadedModel, start: str
) -> None:
    """The prompt's logits choose the first token alone, and only where it is open."""
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    grammar = compiler.compile_grammar(f"root ::= {start} [a-z ]{{4,12}}")
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    requests = [SomeRequest(f"f{n}", tuple(range(7 + n, 30 + 3 * n)), grammar) for n in range(6)]
    for found in generate(model, full(requests), Limits(10), kv_dtype=torch.float32):
        request = next(r for r in requests if r.id == found.request_id)
        assert list(found.token_ids) == greedy_by_hand(oracle, request, 10)[0]
