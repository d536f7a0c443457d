"""Tries candidate policies on development rows, each side alone: what Equation 8 chooses by.

Candidates are judged by replay on Full KV's answers; one JSON line a row has all of them. An answer
that cannot be right any more is not written to its end (`pask.bfcl.early_verdict`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pask.calibration.candidate import PROMPT, Candidate
from pask.calibration.evidence import Measured, measured_evidence
from pask.calibration.families import families_to_make, interventions_of, method_without_policy
from pask.calibration.intervention import Buckets
from pask.calibration.reference import ReferenceRow, read_reference, reference_rows
from pask.calibration.row_files import Line, RowFiles
from pask.calibration.side_by_side import SEATS, Begun, judged
from pask.calibration.trials import Table, distinct, nested_families
from pask.config import RunConfig
from pask.digests import digest
from pask.engine.decode import new_store
from pask.engine.generation import Limits
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel
from pask.engine.replay import Replayed, Replayer
from pask.evaluation.keys import key_parts, read_splits
from pask.evaluation.model import load
from pask.methods.full import FullKV
from pask.provenance import source_digest

PART = "dev"

_FIELDS: dict[str, type] = {
    "id": str,
    "category": str,
    "cluster": str,  # rows of one tool set
    "reference_correct": bool,
    "results": dict,  # by candidate, what `_result` gives
}
_TODO = "run pask scan (or snakemake)"


def scan_rows(config: RunConfig) -> list[str]:
    """The development rows, in the order of the run's split file."""
    sample = read_splits(config).sample(PART, config.data.sample_of(PART))
    return [row_id for group in sample.values() for row_id in group]


def candidates_of(config: RunConfig, measured: Measured) -> dict[str, Candidate]:
    """Every candidate of the run's policies, by key."""
    tables: dict[str, tuple[str, Table]] = {}
    for entry in families_to_make(config).values():
        method = method_without_policy(entry)
        for evidence in measured.sides(method):
            if evidence.side in method.sides:
                tables |= distinct(nested_families(method, evidence))
    wanted = interventions_of(config)
    return {
        key: Candidate(
            side=side,
            table=tuple(sorted(table.items())),
            groups=measured.groups,
            coarsening=config.structure.coarsening,
            recent=wanted.recent,
            sinks=wanted.sinks,
        )
        for key, (side, table) in tables.items()
    }


def files(config: RunConfig, measured: Measured) -> RowFiles:
    """The run's scan of exactly these candidates."""
    wanted = interventions_of(config)
    return RowFiles(
        config,
        "scan",
        _FIELDS,
        scan_rows(config),
        key_parts(config, FullKV(), measured.model_digest)
        | {
            "groups": list(measured.groups),
            "coarsening": config.structure.coarsening,
            "recent": wanted.recent,
            "sinks": wanted.sinks,
            "candidates": digest(sorted(candidates_of(config, measured))),
            "measured_by": source_digest("pask.calibration.scan"),
        },
        _TODO,
    )


def scan(config: RunConfig, *, shard: int = 0, shards: int = 1, threads: int = 1) -> Path:
    """Try all candidates on shard `shard` of `shards` of the development rows.

    Writes results/<run>/scan/<i>-of-<n>.jsonl. PaskError where the split, the evidence or Full KV's
    development answers are missing or of something else.
    """
    torch.set_num_threads(threads)
    model = load(config)
    measured = measured_evidence(config, model.digest, model.layout.layers)
    candidates = candidates_of(config, measured)

    def measure(ids: Sequence[str]) -> Iterator[Line]:
        return _scanned(config, model, candidates, ids)

    return files(config, measured).work(measure, shard=shard, shards=shards, threads=threads)


def _scanned(
    config: RunConfig,
    model: LoadedModel,
    candidates: Mapping[str, Candidate],
    ids: Sequence[str],
) -> Iterator[Line]:
    engine = config.engine
    store = new_store(
        model,
        seats=engine.max_batch + SEATS,
        capacity_tokens=engine.kv_capacity_tokens,
        kv_dtype=KV_DTYPES[engine.kv_dtype],
        page_slots=engine.page_slots,
    )
    replayer = Replayer(model, store, Limits(config.max_new_tokens))
    buckets = Buckets(config.structure.layer_groups, config.structure.coarsening)
    sinks = interventions_of(config).sinks

    def begin(row: ReferenceRow) -> Begun:
        reference = read_reference(
            replayer, row.task, row.tokens, row.judge, buckets=buckets, sinks=sinks
        )
        return Begun(row, reference, reference.trace, list(candidates.items()))

    rows = reference_rows(config, model, PART, ids)
    for begun in judged(replayer, rows, begin, max_batch=engine.max_batch):
        row = begun.row.row
        results = {
            key: _result(candidates[key], found, begun) for key, found in begun.replayed.items()
        }
        yield {
            "id": row.id,
            "category": row.category,
            "cluster": row.cluster,
            "reference_correct": begun.reference.correct,
            "results": dict(sorted(results.items())),
        }


def _result(candidate: Candidate, found: Replayed, begun: Begun) -> dict[str, Any]:
    """What a candidate did to a row's answer.

    `cost`: the side's `tokens` as this candidate keeps them, in tokens at HIGH. They are those of
    Full KV's answer for every candidate: what one breaks must not weigh in its own cost.
    """
    reference, row = begun.reference, begun.row
    labels = row.task.request.prompt_labels or ()
    names = candidate.names(labels) if candidate.side == PROMPT else list(reference.names)
    # The first prompt tokens and the last one stay as they are.
    whole = len(labels) - len(names) if candidate.side == PROMPT else 0
    changed = found.first_difference is not None
    correct = reference.correct
    if changed:
        correct = not found.given_up and row.judge(found.generation)
    return {
        "changed": changed,
        "correct": correct,
        "cost": candidate.tokens_at_high(names) + whole,
        "tokens": len(names) + whole,
        "given_up": found.given_up,
        "token_layers": found.token_layers,
    }
