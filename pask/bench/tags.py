"""What tagging costs a token, against the decode step that made the token.

The run's model answers the rows with Full KV. Each answer is then tagged anew, with a grammar that
was made for it alone, as in a real request: the first visit of every state counts. Beside it stand
xgrammar's own costs on the same tokens, and what each side needs to make a row's grammar ready.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xgrammar as xgr

from pask.bench import Measured
from pask.bench.rows import picked_rows
from pask.bfcl.data import Row
from pask.bfcl.grammar import GrammarCompiler
from pask.bfcl.request import Request, RequestBuilder
from pask.bfcl.tag_grammar import tag_grammar
from pask.config import RunConfig
from pask.engine.decode import generate
from pask.engine.generation import Generation, Limits, Task
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.errors import PaskError
from pask.evaluation.model import load
from pask.methods.full import FullKV
from pask.structure.tracker import Tracker


@dataclass
class _Costs:
    """Nanoseconds of every single call."""

    tag: list[int] = field(default_factory=list)
    accept: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    tag_grammar: list[int] = field(default_factory=list)
    compile: list[int] = field(default_factory=list)


def measure(config: RunConfig, items: int) -> Measured:
    """Microseconds a token, over the answers to `items` rows; theirs is the decode step's share."""
    torch.set_num_threads(1)
    rows = picked_rows(config, items)
    model = load(config)
    info = tokenizer_info(model)
    form = config.model.answer_form
    builder = RequestBuilder(model.tokenizer, info, config.model.prompt, form)
    requests = [builder.build(row) for row in rows]
    step, answers = _decode(model, requests, config)
    costs = _Costs()
    for row, answer in zip(rows, answers, strict=True):
        _cost_of(row, answer, info, form, costs)
    print(f"{len(rows)} rows, {len(costs.tag)} tokens; microseconds, median / p95 / mean",
          file=sys.stderr)  # fmt: skip
    for name, label in (
        ("tag", "tagging, a token"),
        ("accept", "xgrammar accept_token, a token"),
        ("mask", "xgrammar fill_next_token_bitmask, a token"),
        ("tag_grammar", "making the tag grammar, a row"),
        ("compile", "xgrammar compiling the grammar, a row"),
    ):
        print(f"  {label:43}{_summary(getattr(costs, name))}", file=sys.stderr)
    mean = statistics.fmean(costs.tag) / 1e3
    print(
        f"  decode step, a token of a batch of {min(config.engine.max_batch, len(rows))}: "
        f"{step:.0f}; tagging is {100 * mean / step:.3f} % of it in the mean",
        file=sys.stderr,
    )
    unit = "microseconds a token, mean: tagging against the decode step's share"
    return Measured(mean, step, unit, len(costs.tag), less_is_better=True)


def _decode(
    model: LoadedModel, requests: Sequence[Request], config: RunConfig
) -> tuple[float, list[Generation]]:
    """Microseconds a decoded token, and the answers. A run with one token each is taken off: the
    prompts and the first choice are no decode steps."""
    tasks = [Task(request, (("full", FullKV()),)) for request in requests]
    list(generate(model, tasks[:1], Limits(2)))  # untimed: what only the first call pays
    seconds, tokens, answers = [], [], []
    for limit in (1, config.max_new_tokens):
        start = time.perf_counter()
        answers = list(
            generate(
                model,
                tasks,
                Limits(limit),
                max_batch=config.engine.max_batch,
                kv_dtype=KV_DTYPES[config.engine.kv_dtype],
            )
        )
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(answer.new_tokens for answer in answers))
    if tokens[1] <= tokens[0]:
        raise PaskError(
            "the answers are too short to time a decode step", todo="raise decode.max_new_tokens"
        )
    order = {request.id: at for at, request in enumerate(requests)}
    answers.sort(key=lambda answer: order[answer.request_id])
    return 1e6 * (seconds[1] - seconds[0]) / (tokens[1] - tokens[0]), answers


def _cost_of(
    row: Row, answer: Generation, info: xgr.TokenizerInfo, form: str, costs: _Costs
) -> None:
    clock, vocabulary = time.perf_counter_ns, info.decoded_vocab
    start = clock()
    tracker = Tracker(tag_grammar(row.functions, form))
    costs.tag_grammar.append(clock() - start)
    compiler = GrammarCompiler(info, form)  # its own: a compiler remembers what it compiled
    start = clock()
    compiled = compiler.compile_unchecked(row.functions)
    costs.compile.append(clock() - start)
    matcher, mask = xgr.GrammarMatcher(compiled), xgr.allocate_token_bitmask(1, info.vocab_size)
    for token in answer.token_ids:
        text = vocabulary[token]
        start = clock()
        tracker.accept(text)
        costs.tag.append(clock() - start)
        start = clock()
        matcher.fill_next_token_bitmask(mask)
        costs.mask.append(clock() - start)
        start = clock()
        matcher.accept_token(token)
        costs.accept.append(clock() - start)


def _summary(nanoseconds: Sequence[int]) -> str:
    micro = sorted(value / 1e3 for value in nanoseconds)
    p95 = micro[min(len(micro) - 1, int(0.95 * len(micro)))]
    return f"{statistics.median(micro):10.1f} / {p95:10.1f} / {statistics.fmean(micro):10.1f}"
