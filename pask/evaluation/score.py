"""Judges every answer by BFCL's official checker: prediction files in, the long table out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pask.bfcl.data import Row, load_rows
from pask.config import Entry, RunConfig
from pask.errors import HarnessFault, PaskError
from pask.evaluation import keys
from pask.evaluation.judge import judge
from pask.evaluation.parts import read_part
from pask.evaluation.settings import settings_of
from pask.files import whole_file
from pask.methods.contract import Method

COLUMNS = (
    "model", "split", "method", "label", "budget", "nominal", "b_development", "entry", "id",
    "category", "cluster", "correct", "error_type", "finish", "prompt_tokens", "new_tokens",
    "resident_prompt_bytes", "resident_decode_bytes", "full_prompt_bytes", "full_bytes",
    "resident_byte_steps", "read_byte_steps", "full_byte_steps", "notes",
)  # fmt: skip


def long_table(
    config: RunConfig,
    ids: dict[str, tuple[str, ...]],
    predictions: dict[str, list[Path]],
    methods: Mapping[str, Method],
    reached: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """One row per item and entry, in the split's order; columns `COLUMNS`.

    `ids`: the rows of the run by category; `predictions`: entry name -> its shards' files;
    `methods`: entry name -> its method; `reached`: entry name -> B_persist on the development rows,
    for the entries whose knob was searched there.
    Raises HarnessFault where an entry lacks an item or holds one twice: denominators come from the
    split, never from what happens to be there.
    """
    rows = load_rows()
    wanted = [row_id for group in ids.values() for row_id in group]
    records = []
    for entry in config.entries:
        if entry.name not in predictions:
            continue
        found: dict[str, dict[str, Any]] = {}
        for path in predictions[entry.name]:
            for record in read_part(path):
                if record["id"] in found:
                    raise HarnessFault(f"{record['id']} is there twice", where=str(path))
                found[record["id"]] = record
        if found.keys() != set(wanted):
            missing = sorted(set(wanted) - found.keys())
            raise HarnessFault(
                f"{len(missing)} of {len(wanted)} items have no prediction, "
                f"{len(found.keys() - set(wanted))} are not of this run",
                where=f"entry {entry.name}",
                todo="run the evaluation again: it does what is missing",
            )
        method = methods[entry.name]
        development = {"b_development": (reached or {}).get(entry.name, "")}
        records += [_line(config, entry, method, rows[i], found[i]) | development for i in wanted]
    return pd.DataFrame(records, columns=list(COLUMNS))


def _line(
    config: RunConfig, entry: Entry, method: Method, row: Row, record: dict[str, Any]
) -> dict[str, Any]:
    verdict = judge(row, record, config.model.answer_form)
    return {
        **{name: record[name] for name in COLUMNS if name in record},
        "model": config.model.name,
        "split": f"{config.data.split}/{config.data.part}",
        "method": entry.method,
        "label": method.label,
        "budget": entry.budget,
        "nominal": method.setting if method.has_knob else "",
        "entry": entry.name,
        "category": row.category,
        "cluster": row.cluster,
        "correct": int(verdict.correct),
        "error_type": verdict.error_type,
        "notes": " ".join(record["notes"]),
    }


_TODO = "run pask evaluate (or snakemake): it computes what is missing"


def _made(path: Path) -> dict[str, Any]:
    """What a prediction file was made under, the model's printed name included."""
    try:
        manifest = json.loads(path.with_suffix(".manifest.json").read_text(encoding="utf-8"))
        made: dict[str, Any] = manifest["decided_by"] | {"name": manifest["model"]}
        if not isinstance(made["model"], str):
            raise TypeError("no model")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PaskError("no predictions of this shard", where=str(path), todo=_TODO) from error
    return made


def _check_made(config: RunConfig, method: Method, path: Path) -> None:
    """Raise PaskError unless the predictions are there and were made under this config."""
    made = _made(path)
    wanted = keys.key_parts(config, method, made["model"]) | {"name": config.model.name}
    wanted = json.loads(json.dumps(wanted))
    other = sorted(key for key in wanted if made.get(key) != wanted[key])
    if other:
        raise PaskError(
            f"the predictions were made under another {', '.join(other)}",
            where=str(path),
            todo=_TODO,
        )


def score(
    config: RunConfig,
    *,
    methods: Sequence[str] | None = None,
    shards: int | None = None,
    out: Path | None = None,
) -> Path:
    """Write the long table (default results/<run>/long.csv) from the prediction files.

    `methods` limits it to some of the run's methods; `shards` is how many files an entry's
    answers are in (default: as many as the config's evaluation makes).
    """
    ids = keys.read_splits(config).sample(config.data.part, config.data.sample)
    shards = shards or config.engine.shards
    entries = config.select(methods)
    files = {e.name: [keys.prediction_file(config, e, i, shards) for i in range(shards)]
             for e in entries}  # fmt: skip
    settings = settings_of(config, _made(files[entries[0].name][0])["model"], entries)
    for name, method in settings.methods.items():
        for path in files[name]:
            _check_made(config, method, path)
    predictions = {name: files[name] for name in settings.methods}
    table = long_table(config, ids, predictions, settings.methods, settings.reached)
    path = out or keys.RESULTS / config.run / "long.csv"
    with whole_file(path) as file:
        table.to_csv(file, index=False, lineterminator="\n")
    keys.note_made_for(config, path, not_reachable=settings.not_reachable)
    return path
