"""Forwarded token-layers: replay of one-bucket interventions against complete regeneration.

An intervention puts one bucket (a coarsened tag in a layer group) at 4 bit or releases it. As in a
calibration, the buckets are all that occur in answers to calibration rows, of which the measured
ones are taken at equal distances from the most to the least frequent, and each is judged on every
row, whether its answer has the bucket or not. Complete regeneration, as Equation 5 is written,
reads the prompt and writes the answer anew for each, so a forwarded token counts in every layer;
what it would come to is counted from the answers that replay ended with, and on the first row it is
done, to compare the answers and the time. Replay's own figure includes the trace that all its
interventions start from. The ratio over those pairs alone whose row has the bucket is printed too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pask.bench import Measured
from pask.bench.rows import picked_rows
from pask.bfcl.data import subset_of
from pask.bfcl.request import RequestBuilder
from pask.calibration.intervention import OneBucket
from pask.config import RunConfig
from pask.engine.decode import generate, new_store
from pask.engine.generation import Generation, Limits, Task
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.engine.replay import Replayed, Replayer
from pask.errors import PaskError
from pask.evaluation.model import load
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.structure.buckets import LayerBucket, bucket_name, layer_groups

ROWS = 24
"""Three of each category."""

RECENT = 8


@dataclass
class _Sum:
    """Token-layers, and the seconds they took."""

    replayed: int = 0
    regenerated: int = 0
    decoded: int = 0  # of the regenerated ones, without the prompts
    changed: int = 0
    pairs: int = 0
    touched: int = 0  # pairs whose row has the bucket
    touched_replayed: int = 0  # the traces not among them
    touched_regenerated: int = 0
    seconds: float = 0.0


def measure(config: RunConfig, items: int) -> Measured:
    """Token-layers for `items` interventions on each of `ROWS` calibration rows."""
    torch.set_num_threads(1)
    data = replace(config.data, part="cal", sample=None)
    rows = picked_rows(replace(config, data=data), ROWS)
    model = load(config)
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    expected = [config.model.expected_new_tokens[subset_of(row.category)] for row in rows]
    tasks = [
        Task(builder.build(row), (("full", FullKV()),), count)
        for row, count in zip(rows, expected, strict=True)
    ]
    limits = Limits(config.max_new_tokens)
    kv_dtype = KV_DTYPES[config.engine.kv_dtype]
    answers = {
        found.request_id: found for found in generate(model, tasks, limits, kv_dtype=kv_dtype)
    }
    methods = _interventions(config, model, list(answers.values()), items)
    total = _Sum()
    first: list[Replayed] = []
    for task in tasks:
        store = new_store(
            model,
            seats=config.engine.max_batch * 2 + 2,
            capacity_tokens=config.engine.kv_capacity_tokens,
            kv_dtype=kv_dtype,
            page_slots=config.engine.page_slots,
        )
        start = time.perf_counter()
        replayer = Replayer(model, store, limits)
        trace = replayer.trace(task, answers[task.request.id].token_ids)
        outcomes = list(replayer.replay(trace, methods, max_batch=config.engine.max_batch))
        seconds = time.perf_counter() - start
        _add(total, model, trace.token_layers, outcomes)
        if not first:
            first, first_seconds = outcomes, seconds
        total.seconds += seconds
    same, again = _regenerate(model, tasks[0], methods, limits, config, first)
    print(
        f"{len(methods)} interventions on {len(rows)} rows, window {RECENT}: "
        f"{total.changed}/{total.pairs} answers changed; token-layers: replay {total.replayed:,}, "
        f"complete regeneration {total.regenerated:,}, its decoding alone {total.decoded:,} "
        f"({total.decoded / total.replayed:.1f} times replay's)\n"
        f"the bucket occurs in {total.touched}/{total.pairs} pairs; on these alone: replay "
        f"{total.touched_replayed:,}, complete regeneration {total.touched_regenerated:,} "
        f"({total.touched_regenerated / max(total.touched_replayed, 1):.1f} times)\n"
        f"on the first row: replay {first_seconds:.1f} s, decoding each from a shared prefill "
        f"{again:.1f} s; equal answers and bytes {same}/{len(first)}",
        file=sys.stderr,
    )
    unit = "forwarded token-layers (theirs: complete regeneration, prompt included)"
    return Measured(total.replayed, total.regenerated, unit, len(methods), less_is_better=True)


def _add(total: _Sum, model: LoadedModel, traced: int, outcomes: Sequence[Replayed]) -> None:
    layers = model.layout.layers
    total.replayed += traced + sum(outcome.token_layers for outcome in outcomes)
    for outcome in outcomes:
        answer = outcome.generation
        total.pairs += 1
        total.changed += outcome.first_difference is not None
        fed = answer.new_tokens - (answer.finish == "length")  # the last token is chosen, not fed
        total.decoded += fed * layers
        total.regenerated += (answer.prompt_tokens + fed) * layers
        if outcome.token_layers:
            total.touched += 1
            total.touched_replayed += outcome.token_layers
            total.touched_regenerated += (answer.prompt_tokens + fed) * layers


def _interventions(
    config: RunConfig, model: LoadedModel, answers: Sequence[Generation], items: int
) -> list[tuple[str, OneBucket]]:
    """`items` of: each bucket that occurs, by how often, in each group, released and at 4 bit."""
    structure = config.structure
    seen: dict[str, int] = {}
    for answer in answers:
        for tag in answer.tags:
            name = bucket_name(tag, structure.coarsening)
            seen[name] = seen.get(name, 0) + 1
    groups = len(layer_groups(model.layout.layers, structure.layer_groups))
    methods = [
        (
            f"{name}|{group}|{level.name}",
            OneBucket(
                bucket=LayerBucket(name, group),
                level=level,
                recent=RECENT,
                groups=structure.layer_groups,
                coarsening=structure.coarsening,
            ),
        )
        for name in sorted(seen, key=lambda name: (-seen[name], name))
        for group in range(groups)
        for level in (Level.RELEASE, Level.LOW4)
    ]
    if items > len(methods):
        raise PaskError(f"--items must be 1 to {len(methods)} here, not {items}")
    return [methods[n * len(methods) // items] for n in range(items)]


def _regenerate(
    model: LoadedModel,
    task: Task,
    methods: Sequence[tuple[str, OneBucket]],
    limits: Limits,
    config: RunConfig,
    replayed: Sequence[Replayed],
) -> tuple[int, float]:
    """How many of a row's replays decoding agrees with, in all, and its seconds."""
    start = time.perf_counter()
    decoded: list[Generation] = []
    size = config.engine.max_batch
    for at in range(0, len(methods), size):
        part = Task(task.request, tuple(methods[at : at + size]), task.expected_new_tokens)
        decoded += generate(
            model, [part], limits, max_batch=size, kv_dtype=KV_DTYPES[config.engine.kv_dtype]
        )
    seconds = time.perf_counter() - start
    by_entry = {found.entry: found for found in decoded}
    same = sum(by_entry[one.generation.entry] == one.generation for one in replayed)
    return same, seconds
