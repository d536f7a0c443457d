"""Generates the answers of a run: one shard of its rows under all of its entries.

Prefill is computed once a row and shared by the entries; finished items are appended to part files
at once, so that a killed run goes on where it was. Answers are not judged here, except for the
running accuracy in the progress line.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from pask.bfcl.data import Row, load_rows, subset_of
from pask.bfcl.request import RequestBuilder
from pask.config import RunConfig
from pask.digests import digest
from pask.engine.decode import generate
from pask.engine.generation import MAX_ENTRIES, Limits, Task
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.evaluation import keys
from pask.evaluation.judge import judge
from pask.evaluation.model import load
from pask.evaluation.parts import finished
from pask.evaluation.record import Record, record_of
from pask.evaluation.settings import settings_of
from pask.files import write_json, write_text
from pask.json_lines import line_of, open_lines
from pask.methods.contract import Method
from pask.progress import Progress
from pask.provenance import machine, revision


class _Tally:
    """Running accuracy per entry, for the progress line only."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._counts = {name: [0, 0] for name in entries}

    def add(self, entry: str, correct: bool) -> None:
        self._counts[entry][0] += correct
        self._counts[entry][1] += 1

    def text(self) -> str:
        return ", ".join(f"{name} {k}/{n} right" for name, (k, n) in self._counts.items() if n)


def evaluate(
    config: RunConfig,
    *,
    shard: int = 0,
    shards: int = 1,
    methods: Sequence[str] | None = None,
    threads: int = 1,
) -> list[Path]:
    """Generate shard `shard` of `shards` under the run's entries (or those of `methods`).

    Writes results/<run>/predictions/<entry>/<i>-of-<n>.jsonl, with a manifest beside each; returns
    the paths. Raises PaskError for bad input, HarnessFault where the harness is at fault.
    """
    start = time.monotonic()
    torch.set_num_threads(threads)
    entries = config.select(methods)
    splits = keys.read_splits(config)
    sample = splits.sample(config.data.part, config.data.sample)
    ids = [row_id for group in sample.values() for row_id in group][shard::shards]
    model = load(config)
    settings = settings_of(config, model.digest, entries)
    decided_by = {
        entry: keys.key_parts(config, method, model.digest)
        for entry, method in settings.methods.items()
    }
    folders = {entry: keys.part_folder(config, entry, parts) for entry, parts in decided_by.items()}
    done = {entry: finished(folder) for entry, folder in folders.items()}
    missing = {i: tuple(entry for entry in done if i not in done[entry]) for i in ids}
    name = keys.shard_name(shard, shards)
    targets = {e.name: keys.prediction_file(config, e, shard, shards) for e in entries}
    for path in targets.values():  # a folder that cannot be made is told before the work
        path.parent.mkdir(parents=True, exist_ok=True)
    _generate_missing(config, model, settings.methods, missing, done, folders, name)
    about = {
        "run": config.run,
        "model": config.model.name,
        "shard": name,
        "items": len(ids),
        "splits": splits.digest,
        "commit": revision(),
        "machine": machine(),
        "threads": threads,
        "wall_seconds": round(time.monotonic() - start, 1),
    }
    written = []
    for entry, path in targets.items():
        if entry in settings.not_reachable:
            write_text(path, "")
            own = {"items": 0, "not_reachable": settings.not_reachable[entry]}
            parts = {"model": model.digest}
        else:
            write_text(path, "".join(line_of(done[entry][i]) for i in ids))
            parts = decided_by[entry]
            fresh = sum(entry in still for still in missing.values())
            own = {"items_computed_now": fresh, "key": digest(parts)}
        own |= {"entry": entry, "decided_by": parts}
        write_json(path.with_suffix(".manifest.json"), about | own)
        written.append(path)
    return written


def _generate_missing(
    config: RunConfig,
    model: LoadedModel,
    methods: Mapping[str, Method],
    missing: Mapping[str, tuple[str, ...]],
    done: dict[str, dict[str, Record]],
    folders: Mapping[str, Path],
    shard_name: str,
) -> None:
    """Answer each row under the entries that miss it, into the part files and into `done`."""
    rows = load_rows()
    left = sum(len(names) for names in missing.values())
    total = len(missing) * len(done)
    what = f"evaluate {config.run} shard {shard_name}"
    tally = _Tally(done)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(what, total, done=total - left))
        writers = {
            name: stack.enter_context(open_lines(folders[name] / f"{shard_name}.jsonl"))
            for name in sorted({name for names in missing.values() for name in names})
        }
        for generation in generate(
            model,
            _tasks(config, model, methods, rows, missing),
            Limits(config.max_new_tokens),
            max_batch=config.engine.max_batch,
            kv_dtype=KV_DTYPES[config.engine.kv_dtype],
            capacity_tokens=config.engine.kv_capacity_tokens,
            page_slots=config.engine.page_slots,
        ):
            record = record_of(generation)
            writers[generation.entry].append(record)
            done[generation.entry][record["id"]] = record
            verdict = judge(rows[record["id"]], record, config.model.answer_form)
            tally.add(generation.entry, verdict.correct)
            progress.advance(detail=tally.text())


def _tasks(
    config: RunConfig,
    model: LoadedModel,
    methods: Mapping[str, Method],
    rows: Mapping[str, Row],
    missing: Mapping[str, tuple[str, ...]],
) -> Iterator[Task]:
    """Built one at a time, as decoding asks for them: a compiled grammar is not kept for long."""
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    for row_id, names in missing.items():
        if names:
            entries = tuple((name, methods[name]) for name in names)
            expected = config.model.expected_new_tokens[subset_of(rows[row_id].category)]
            request = builder.build(rows[row_id])
            for start in range(0, len(entries), MAX_ENTRIES):
                yield Task(request, entries[start : start + MAX_ENTRIES], expected)
