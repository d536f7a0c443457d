"""What decides an item's result, as a digest; and the folders that carry it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pask.bfcl.data import data_digest
from pask.bfcl.splits import Splits
from pask.config import Entry, RunConfig
from pask.digests import digest
from pask.engine.kernel_body import kernel_body
from pask.errors import PaskError
from pask.files import write_json
from pask.methods.contract import Method
from pask.methods.registry import method_class
from pask.policy.policy import Policy
from pask.provenance import source_digest, versions

RESULTS = Path("results")

# The modules whose code an item's result goes through, besides the method's own. Tags and labels
# are among them: they are what methods may act on.
_COMPUTE = (
    "pask.engine.decode",
    "pask.engine.loading",
    "pask.bfcl.request",
    "pask.evaluation.record",
    # The bodies are imported by name while running, so no import statement leads to them.
    "kernels.cpu",
    "kernels.reference",
)


def key_parts(config: RunConfig, method: Method, model_digest: str) -> dict[str, Any]:
    """Everything that decides the result of one item under a method.

    The split is not among it: a row's result does not depend on which part the row is in, and
    batch size, shards and threads are not, since decoding does not depend on what else runs.
    """
    return {
        "method": method.name,
        "parameters": _parameters(method),
        "model": model_digest,
        "prompt": config.model.prompt,
        "answer_form": config.model.answer_form,
        "expected_new_tokens": config.model.expected_new_tokens,
        "max_new_tokens": config.max_new_tokens,
        "kv_dtype": config.engine.kv_dtype,
        "page_slots": config.engine.page_slots,
        "data": data_digest(),
        "versions": versions(),
        "kernels": kernel_body(),
        "source": source_digest(*_COMPUTE, type(method).__module__),
    }


def _parameters(method: Method) -> dict[str, Any]:
    """The fields of a method; a policy, which is long, by its digest."""
    fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return {
        name: value.digest if isinstance(value, Policy) else value for name, value in fields.items()
    }


def part_folder(config: RunConfig, entry_name: str, decided_by: Mapping[str, Any]) -> Path:
    """results/<run>/parts/<entry>-<key>: a change of anything decisive opens a new folder."""
    return RESULTS / config.run / "parts" / f"{entry_name}-{digest(decided_by)[:16]}"


def shard_name(shard: int, shards: int) -> str:
    """`1-of-2` for shard 0 of 2: people count from one."""
    return f"{shard + 1}-of-{shards}"


def prediction_file(config: RunConfig, entry: Entry, shard: int, shards: int) -> Path:
    """The finished answers of one entry and shard, in the split's order."""
    folder = RESULTS / config.run / "predictions" / entry.name
    return folder / f"{shard_name(shard, shards)}.jsonl"


def note_made_for(config: RunConfig, path: Path, **more: Any) -> None:
    """Write beside a result file which config it was made for, and what else is to be known."""
    write_json(path.with_suffix(".manifest.json"), {"config": config.digest} | more)


def check_made_for(config: RunConfig, path: Path) -> dict[str, Any]:
    """What was noted of `path`; PaskError unless it was made for exactly this config."""
    try:
        made = dict(json.loads(path.with_suffix(".manifest.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        made = {}
    if made.get("config") != config.digest:
        raise PaskError(
            "it was made for another config",
            where=str(path),
            todo="run pask score (or snakemake) with the same config and overrides",
        )
    return made


def method_modules(config: RunConfig) -> list[str]:
    """The modules of the run's methods, for a source digest over what the run executes."""
    return sorted({method_class(entry.method).__module__ for entry in config.entries})


def splits_file(config: RunConfig) -> Path:
    return RESULTS / config.run / "splits.json"


def read_splits(config: RunConfig) -> Splits:
    """The run's split file; PaskError where it is not the split that the config asks for."""
    path = splits_file(config)
    splits = Splits.read(path)
    wanted = (config.data.split, config.data.seed)
    if (splits.kind, splits.seed) != wanted:
        raise PaskError(
            f"it is the {splits.kind} split, seed {splits.seed}",
            where=str(path),
            why=f"the config asks for {wanted[0]}, seed {wanted[1]}",
            todo="run pask splits again",
        )
    return splits
