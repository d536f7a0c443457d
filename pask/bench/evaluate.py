"""Item-methods per hour: this engine against a plain transformers + xgrammar loop.

Both sides have as many cores as the run has shards: ours as that many processes of one thread, as
the workflow does it, the plain loop as that many threads of torch. The plain loop answers each row
under each method on its own, which takes it long, so it does that for a sample: every fifth row
under one method, the next one under the next method, and so on round. One half of the sample is
answered before ours and one after. Equal answers are counted where both gave one: a speed for other
answers would be worth nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from pask.bench import Measured
from pask.bench.plain import PlainLoop
from pask.bench.rows import picked_rows
from pask.bfcl.data import Row, subset_of
from pask.bfcl.request import Request, RequestBuilder
from pask.config import RunConfig
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.evaluation.model import load
from pask.evaluation.settings import settings_of

PLAIN_EVERY = 5  # rows for one that the plain loop answers; no divisor of the 8 categories

Answers = dict[tuple[str, str], tuple[int, ...]]  # by row and entry: token ids


@dataclass
class _Side:
    """What one side has done so far."""

    answers: Answers = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers.values()))

    @property
    def per_hour(self) -> float:
        return 3600 * len(self.answers) / self.seconds

    def text(self) -> str:
        return (
            f"{len(self.answers)} item-methods, {self.tokens} tokens in {self.seconds:.1f} s "
            f"({self.tokens / self.seconds:.1f} tokens/s)"
        )


class _Work:
    """A loaded model and the requests of some rows."""

    def __init__(self, config: RunConfig, rows: Sequence[Row]) -> None:
        self.config = config
        self.model: LoadedModel = load(config)
        builder = RequestBuilder(
            self.model.tokenizer,
            tokenizer_info(self.model),
            config.model.prompt,
            config.model.answer_form,
        )
        self.requests: list[Request] = [builder.build(row) for row in rows]
        self.methods = tuple(settings_of(config, self.model.digest).methods.items())
        self.expected = [config.model.expected_new_tokens[subset_of(row.category)] for row in rows]

    def tasks(self, chosen: Sequence[int]) -> list[Task]:
        return [Task(self.requests[n], self.methods, self.expected[n]) for n in chosen]


_work: _Work


def _begin(config: RunConfig, rows: Sequence[Row]) -> None:
    """Prepare one of our processes."""
    global _work
    torch.set_num_threads(1)
    _work = _Work(config, rows)


def _ready() -> None:
    time.sleep(0.5)  # long enough for every process to take one of these


def _ours(chosen: Sequence[int]) -> Answers:
    engine = _work.config.engine
    return {
        (found.request_id, found.entry): found.token_ids
        for found in generate(
            _work.model,
            _work.tasks(chosen),
            Limits(_work.config.max_new_tokens),
            max_batch=engine.max_batch,
            kv_dtype=KV_DTYPES[engine.kv_dtype],
            capacity_tokens=engine.kv_capacity_tokens,
        )
    }


def _answer_plainly(work: _Work, plain: PlainLoop, chosen: Sequence[int], side: _Side) -> None:
    for n in chosen:
        request = work.requests[n]
        name, method = work.methods[n // PLAIN_EVERY % len(work.methods)]
        start = time.perf_counter()
        answer = plain.answer(request, method, work.expected[n], work.config.max_new_tokens)
        side.seconds += time.perf_counter() - start
        side.answers[request.id, name] = answer


def measure(config: RunConfig, items: int) -> Measured:
    """Item-methods per hour, over `items` rows of the run's part."""
    rows = picked_rows(config, items, at_least=2 * PLAIN_EVERY)
    cores = config.engine.shards
    work = _Work(config, rows)
    plain = PlainLoop(work.model.folder)
    torch.set_num_threads(cores)
    ours, theirs = _Side(), _Side()
    sample = range(0, len(rows), PLAIN_EVERY)
    half = len(sample) // 2
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, spawn, _begin, (config, rows)) as pool:
        for waited in [pool.submit(_ready) for _ in range(cores)]:
            waited.result()
        _answer_plainly(work, plain, sample[:half], theirs)
        start = time.perf_counter()
        # In stretches: the rows take turns among the categories, whose answers differ in length.
        ends = [len(rows) * core // cores for core in range(cores + 1)]
        for answers in pool.map(_ours, [range(*pair) for pair in pairwise(ends)]):
            ours.answers |= answers
        ours.seconds += time.perf_counter() - start
        _answer_plainly(work, plain, sample[half:], theirs)
    same = sum(ours.answers[key] == answer for key, answer in theirs.answers.items())
    print(
        f"{len(rows)} rows, {len(work.methods)} methods, {cores} cores: ours {ours.text()}; "
        f"plain loop {theirs.text()}; equal answers {same}/{len(theirs.answers)}",
        file=sys.stderr,
    )
    return Measured(ours.per_hour, theirs.per_hour, f"item-methods/hour, {cores} cores", len(rows))
