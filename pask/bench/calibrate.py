"""Forwarded token-layers: measuring calibration rows against complete regeneration.

A row is measured as `pask evidence` does it: one pass over the prompt and Full KV's answer, then
every intervention of both sides, and the distortions of Equation 4 (which forward nothing).
Complete regeneration, as Equation 5 is written, reads the prompt and writes the answer anew for
each intervention; of all (bucket, level) pairs only those whose bucket occurs in the row are
counted. Where an answer was given up, how long it would have become is not known: it counts as far
as it came, so the ratio is a lower bound. Writing the answers under Full KV is in neither side.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from pask.bench import Measured
from pask.bench.rows import picked_rows
from pask.bfcl.data import subset_of
from pask.bfcl.request import RequestBuilder
from pask.calibration.families import families_to_make, interventions_of
from pask.calibration.intervention import Buckets, Interventions
from pask.calibration.measure_row import RowMeasurer
from pask.calibration.reference import ReferenceRow
from pask.calibration.side_by_side import SEATS
from pask.config import RunConfig
from pask.engine.decode import generate, new_store
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.evaluation.model import load
from pask.methods.full import FullKV
from pask.methods.pask import PASK

PART = "cal"
GOAL_RATIO = 20
GOAL_ROWS, GOAL_CORES, GOAL_MINUTES = 200, 2, 60


@dataclass
class _Sum:
    ours: int = 0  # token-layers
    theirs: int = 0
    interventions: int = 0
    changed: int = 0
    given_up: int = 0

    def add(self, line: dict[str, Any], layers: int) -> None:
        prompt = line["prompt_tokens"]
        self.ours += (prompt + line["fed"]) * layers
        for outcome in line["outcomes"]:
            self.ours += outcome["token_layers"]
            self.theirs += (prompt + outcome["fed"]) * layers
            self.interventions += 1
            self.changed += outcome["changed"]
            self.given_up += outcome["given_up"]


def measure(config: RunConfig, items: int) -> Measured:
    """Token-layers for all interventions on `items` of the run's calibration rows."""
    torch.set_num_threads(1)
    wanted = _interventions(config)
    model = load(config)
    store = new_store(
        model,
        seats=config.engine.max_batch + SEATS,
        capacity_tokens=config.engine.kv_capacity_tokens,
        kv_dtype=KV_DTYPES[config.engine.kv_dtype],
        page_slots=config.engine.page_slots,
    )
    measurer = RowMeasurer(
        model,
        store,
        Limits(config.max_new_tokens),
        Buckets(config.structure.layer_groups, config.structure.coarsening),
        wanted,
        max_batch=config.engine.max_batch,
    )
    total = _Sum()
    rows = _rows(config, model, items)
    start = time.process_time()
    for _, line in measurer.measure(rows):
        total.add(line, model.layout.layers)
    a_row = (time.process_time() - start) / items
    minutes = a_row * GOAL_ROWS / GOAL_CORES / 60
    print(
        f"{items} rows, {total.interventions} interventions (levels of {wanted.ladder}, window "
        f"{wanted.recent}): {total.changed} answers changed, {total.given_up} "
        f"({total.given_up / total.interventions:.0%}) given up\n"
        f"token-layers: {total.ours:,}; complete regeneration {total.theirs:,} or more "
        f"({total.theirs / total.ours:.1f} times; goal {GOAL_RATIO})\n"
        f"{a_row:.1f} s of one core a row, so {GOAL_ROWS} rows on {GOAL_CORES} cores: "
        f"{minutes:.0f} minutes (goal {GOAL_MINUTES})",
        file=sys.stderr,
    )
    unit = "forwarded token-layers (theirs: complete regeneration, prompt included)"
    return Measured(total.ours, total.theirs, unit, items, less_is_better=True)


def _interventions(config: RunConfig) -> Interventions:
    """The run's, or those of the default method where it makes no policy."""
    if families_to_make(config):
        return interventions_of(config)
    method = PASK()
    return Interventions(method.recent, method.ladder, method.sinks)


def _rows(config: RunConfig, model: LoadedModel, items: int) -> list[ReferenceRow]:
    """Calibration rows with the answers under Full KV, written here."""
    data = replace(config.data, part=PART, sample=config.data.sample_of(PART))
    rows = picked_rows(replace(config, data=data), items)
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    tasks = [
        Task(
            builder.build(row),
            (("full", FullKV()),),
            config.model.expected_new_tokens[subset_of(row.category)],
        )
        for row in rows
    ]
    kv_dtype = KV_DTYPES[config.engine.kv_dtype]
    answers = generate(model, tasks, Limits(config.max_new_tokens), kv_dtype=kv_dtype)
    tokens = {found.request_id: found.token_ids for found in answers}
    return [
        ReferenceRow(row, task, tokens[row.id], config.model.answer_form)
        for row, task in zip(rows, tasks, strict=True)
    ]
