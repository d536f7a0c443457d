"""Measures what calibrated methods have to know, on rows of the calibration part.

Every method sees the same prompts through `pask.calibration.probe`. What they measure is written to
results/<run>/calibration.json together with everything that decides it, and read from there
wherever the run's methods are made.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.paged import GROUP
from pask.bfcl.data import Row, data_digest, load_rows, subset_of
from pask.bfcl.request import RequestBuilder
from pask.calibration.probe import PromptProbe, read_prompt
from pask.config import Entry, RunConfig
from pask.digests import digest
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.engine.prefill import prepare
from pask.errors import PaskError
from pask.evaluation.keys import RESULTS, read_splits
from pask.evaluation.model import load
from pask.files import write_json
from pask.methods.full import FullKV
from pask.methods.registry import make_method, method_class
from pask.progress import Progress
from pask.provenance import source_digest, versions

PART = "cal"

_PAGE_SLOTS = 16  # of the engine's pages; what a prompt's attention loses does not depend on it

_TODO = "run pask calibrate (or snakemake)"


def calibration_file(config: RunConfig) -> Path:
    return RESULTS / config.run / "calibration.json"


def calibrate(config: RunConfig) -> Path | None:
    """Calibrate the run's methods on its model; the file written, None where none asks for it.

    Takes the rows that the config's `cal_sample` names. PaskError for a model or row that cannot be
    used, and for a method that the prompts give nothing to measure.
    """
    families = calibrated_families(config)
    if not families:
        return None
    torch.set_num_threads(1)  # sums, and so the file, would depend on how many there are
    model = load(config)
    if model.layout.head_dim % GROUP:
        raise PaskError(
            f"head_dim {model.layout.head_dim} is no multiple of {GROUP}",
            where=model.name,
            why=f"low levels are quantised in groups of {GROUP} channels",
            todo=f"leave out {', '.join(families)}",
        )
    decided_by = _decided_by(config, model.digest, families)
    every = load_rows()
    rows = [every[row_id] for row_id in calibration_rows(config)]
    methods = {}
    for family, entry in families.items():
        method = make_method(entry.method, None, entry.params)
        with Progress(f"calibrate {config.run} {family}", len(rows)) as progress:
            try:
                fields = method.calibrate(_prompts(config, model, rows, progress))
                # Refused here, rather than by every later step.
                make_method(entry.method, None, entry.params, measured=fields)
            except ValueError as error:
                raise PaskError(str(error), where=f"calibration of {family}") from error
        methods[family] = {"fields": dict(fields)}
    path = calibration_file(config)
    write_json(path, {"decided_by": decided_by, "methods": methods})
    return path


def read_calibration(config: RunConfig, model_digest: str) -> Mapping[str, Mapping[str, Any]]:
    """By family, the fields that its method's calibration gave; empty where none is calibrated.

    PaskError where they were not measured, or for something else than this config and model.
    """
    families = calibrated_families(config)
    if not families:
        return {}
    path = calibration_file(config)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        made = dict(found["decided_by"])
        fields = {
            family: {str(k): _tuples(v) for k, v in found["methods"][family]["fields"].items()}
            for family in found["methods"]
        }
    except FileNotFoundError:
        raise PaskError("nothing was calibrated yet", where=str(path), todo=_TODO) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise PaskError("the file is damaged", where=str(path), why=why, todo=_TODO) from error
    wanted = json.loads(json.dumps(_decided_by(config, model_digest, families)))
    other = sorted(key for key in wanted if made.get(key) != wanted[key])
    if other:
        what = f"it was calibrated under another {', '.join(other)}"
        raise PaskError(what, where=str(path), todo=_TODO)
    if missing := sorted(families.keys() - fields.keys()):
        what = f"it has nothing of {', '.join(missing)}"
        raise PaskError(what, where=str(path), todo=_TODO)
    return {family: fields[family] for family in families}


def calibrated_families(config: RunConfig) -> dict[str, Entry]:
    """An entry of each family whose method is calibrated, by the family's name."""
    found: dict[str, Entry] = {}
    for entry in config.entries:
        if method_class(entry.method).calibrated:
            found.setdefault(entry.family, entry)
    return found


def calibration_rows(config: RunConfig) -> list[str]:
    """The ids of the rows, in the order of the run's split file."""
    sample = read_splits(config).sample(PART, config.data.sample_of(PART))
    return [row_id for group in sample.values() for row_id in group]


def _decided_by(
    config: RunConfig, model_digest: str, families: Mapping[str, Entry]
) -> dict[str, Any]:
    return {
        "methods": {
            family: {
                "method": entry.method,
                "parameters": dataclasses.asdict(make_method(entry.method, None, entry.params)),
                "source": source_digest(method_class(entry.method).__module__),
            }
            for family, entry in families.items()
        },
        "rows": digest(calibration_rows(config)),
        "model": model_digest,
        "prompt": config.model.prompt,
        "answer_form": config.model.answer_form,
        "expected_new_tokens": dict(config.model.expected_new_tokens),
        "kv_dtype": config.engine.kv_dtype,
        "data": data_digest(),
        "versions": versions(),
        "source": source_digest("pask.calibration.run", "pask.engine.loading", "pask.bfcl.request"),
    }


def _prompts(
    config: RunConfig, model: LoadedModel, rows: Sequence[Row], progress: Progress
) -> Iterator[PromptProbe]:
    """One prompt at a time is read, and dropped when the next is asked for."""
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    kv_dtype = KV_DTYPES[config.engine.kv_dtype]
    for row in rows:
        request = builder.build(row)
        expected = config.model.expected_new_tokens[subset_of(row.category)]
        task = Task(request, (("full", FullKV()),), expected)
        info = prepare(model, task, Limits(config.max_new_tokens), _PAGE_SLOTS).info
        yield read_prompt(model.transformer, info, request.prompt_ids, kv_dtype)
        progress.advance()


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value
