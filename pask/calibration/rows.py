"""Measures what PASK's policy is made from, on the calibration rows: one JSON line a row.

A line is what `pask.calibration.measure_row` finds; `pask.calibration.row_files` keeps the lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pask.calibration.intervention import Buckets, Interventions
from pask.calibration.measure_row import RowMeasurer
from pask.calibration.reference import reference_rows
from pask.calibration.row_files import Line, RowFiles
from pask.calibration.run import PART, calibration_rows
from pask.calibration.side_by_side import SEATS
from pask.config import RunConfig
from pask.engine.decode import new_store
from pask.engine.generation import Limits
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel
from pask.evaluation.keys import key_parts
from pask.evaluation.model import load
from pask.methods.full import FullKV
from pask.provenance import source_digest

FIELDS: dict[str, type] = {
    "id": str,
    "category": str,
    "cluster": str,  # rows of one tool set
    "prompt_tokens": int,
    "fed": int,  # tokens of the answer whose keys and values were stored
    "replayed": int,  # of these, what interventions were replayed on
    "reference_correct": bool,
    "names": list,  # the bucket name of each fed token
    "labels": dict,  # prompt tokens by label, of those that an intervention may touch
    "outcomes": list,
    "distortions": list,
}

_TODO = "run pask evidence (or snakemake): what is finished is kept"


def evidence_files(config: RunConfig, interventions: Interventions, model_digest: str) -> RowFiles:
    """The run's evidence of these interventions.

    Neither batch size, shards and threads decide a line, nor who wrote the answer that measuring
    starts from.
    """
    groups = config.structure.layer_groups
    decided_by: dict[str, Any] = key_parts(config, FullKV(), model_digest) | {
        "layer_groups": groups if isinstance(groups, int) else list(groups),
        "coarsening": config.structure.coarsening,
        "recent": interventions.recent,
        "ladder": str(interventions.ladder),
        "sinks": interventions.sinks,
        "measured_by": source_digest("pask.calibration.rows"),
    }
    return RowFiles(config, "evidence", FIELDS, calibration_rows(config), decided_by, _TODO)


def measure_rows(
    config: RunConfig,
    interventions: Interventions,
    *,
    shard: int = 0,
    shards: int = 1,
    threads: int = 1,
) -> Path:
    """Measure shard `shard` of `shards` of the run's calibration rows.

    Writes results/<run>/evidence/<i>-of-<n>.jsonl with a manifest beside it; returns the path.
    PaskError for bad input, such as a split or Full-KV answers of the part "cal" that are not
    there; HarnessFault where the harness is at fault.
    """
    torch.set_num_threads(threads)
    model = load(config)

    def measure(ids: Sequence[str]) -> Iterator[Line]:
        return _measured(config, interventions, model, ids)

    files = evidence_files(config, interventions, model.digest)
    return files.work(measure, shard=shard, shards=shards, threads=threads)


def read_evidence(
    config: RunConfig, interventions: Interventions, model_digest: str, *, shards: int
) -> list[Line]:
    """The lines of all the run's calibration rows, in the split's order; errors as of
    `RowFiles.read`."""
    return evidence_files(config, interventions, model_digest).read(shards)


def _measured(
    config: RunConfig, interventions: Interventions, model: LoadedModel, ids: Sequence[str]
) -> Iterator[Line]:
    """The rows' lines, the first to be finished first."""
    engine, structure = config.engine, config.structure
    store = new_store(
        model,
        seats=engine.max_batch + SEATS,
        capacity_tokens=engine.kv_capacity_tokens,
        kv_dtype=KV_DTYPES[engine.kv_dtype],
        page_slots=engine.page_slots,
    )
    measurer = RowMeasurer(
        model,
        store,
        Limits(config.max_new_tokens),
        Buckets(structure.layer_groups, structure.coarsening),
        interventions,
        max_batch=engine.max_batch,
    )
    for one, line in measurer.measure(reference_rows(config, model, PART, ids)):
        about = {"id": one.row.id, "category": one.row.category, "cluster": one.row.cluster}
        yield about | line
