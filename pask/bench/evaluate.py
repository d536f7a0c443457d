"""Item-methods per hour: this engine against a plain transformers + xgrammar loop.

The plain loop is what one writes first: for each row and each method on its own, prefill with
transformers' cache, then one token at a time with the mask of xgrammar. It answers with Full KV
only; ours answers with every entry of the run. Both sides answer the same rows with the same
weights in fp32 on one thread, in alternating rounds, and where they decode the same numbers (Full
KV) their tokens are compared: a speed for other answers would be worth nothing.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
import xgrammar as xgr
from transformers import AutoModelForCausalLM, PreTrainedModel

from pask.bench import Measured
from pask.bench.rows import picked_rows
from pask.bfcl.request import Request, RequestBuilder
from pask.config import RunConfig
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.loading import tokenizer_info
from pask.engine.store import KV_DTYPES
from pask.evaluation.keys import method_of
from pask.evaluation.model import load

ROUNDS = 2


@dataclass
class _Side:
    """What one side has done so far."""

    item_methods: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def per_hour(self) -> float:
        return 3600 * self.item_methods / self.seconds


def plain_answer(
    model: PreTrainedModel, request: Request, vocab_size: int, limit: int
) -> tuple[int, ...]:
    """The plain loop's answer to one request: greedy token ids without the stop token."""
    matcher = xgr.GrammarMatcher(request.grammar)
    bitmask = xgr.allocate_token_bitmask(1, vocab_size)
    ids, past = torch.tensor([request.prompt_ids]), None
    answer: list[int] = []
    while len(answer) < limit:
        out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, logits = out.past_key_values, out.logits[:, -1]
        matcher.fill_next_token_bitmask(bitmask)
        xgr.apply_token_bitmask_inplace(logits, bitmask)
        token = int(logits.argmax())
        matcher.accept_token(token)
        if matcher.is_terminated():
            break
        answer.append(token)
        ids = torch.tensor([[token]])
    return tuple(answer)


def measure(config: RunConfig, items: int) -> Measured:
    """Item-methods per hour, over `items` rows of the run's part."""
    torch.set_num_threads(1)
    rows = picked_rows(config, items, at_least=ROUNDS)
    model = load(config)
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    requests = [builder.build(row) for row in rows]
    reference = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    methods = tuple((entry.name, method_of(entry)) for entry in config.entries)
    full = next((e.name for e in config.entries if e.method == "full"), None)
    limits = Limits(config.max_new_tokens)
    ours, theirs, same = _Side(), _Side(), 0
    for turn in range(ROUNDS):
        batch = requests[turn::ROUNDS]
        start = time.perf_counter()
        done = list(
            generate(
                model,
                [Task(request, methods) for request in batch],
                limits,
                max_batch=config.engine.max_batch,
                kv_dtype=KV_DTYPES[config.engine.kv_dtype],
            )
        )
        ours.seconds += time.perf_counter() - start
        ours.item_methods += len(done)
        ours.tokens += sum(len(generation.token_ids) for generation in done)
        answers = {g.request_id: g.token_ids for g in done if g.entry == full}
        for request in batch:
            start = time.perf_counter()
            with torch.inference_mode():
                answer = plain_answer(
                    reference, request, model.layout.vocab_size, config.max_new_tokens
                )
            theirs.seconds += time.perf_counter() - start
            theirs.item_methods += 1
            theirs.tokens += len(answer)
            same += answer == answers.get(request.id)
    print(
        f"{len(requests)} rows: ours {ours.item_methods} item-methods, {ours.tokens} tokens in "
        f"{ours.seconds:.1f} s; plain loop {theirs.item_methods} item-methods, {theirs.tokens} "
        f"tokens in {theirs.seconds:.1f} s; equal Full KV answers {same}/{len(requests)}",
        file=sys.stderr,
    )
    unit = "item-methods/hour on one thread (theirs: Full KV only)"
    return Measured(ours.per_hour, theirs.per_hour, unit, len(requests))
