"""Generates the answers of a run: one shard of its rows under all of its entries.

Prefill is computed once a row and shared by the entries; finished items are appended to part files
at once, so that a killed run goes on where it was. Answers are not judged here, except for the
running accuracy in the progress line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from pask.bfcl.answers import MalformedAnswer, parse
from pask.bfcl.checker import check
from pask.bfcl.data import Row, load_rows
from pask.bfcl.request import RequestBuilder
from pask.bfcl.splits import Splits
from pask.config import Entry, RunConfig
from pask.engine.decode import Generation, Limits, Task, generate, tokenizer_info
from pask.engine.loading import LoadedModel
from pask.evaluation import keys, parts
from pask.evaluation.model import load
from pask.files import whole_file, write_json
from pask.progress import Progress
from pask.provenance import digest, machine, revision


def record_of(generation: Generation) -> dict[str, Any]:
    """A generation as a part file's line: everything but the entry, which the folder says."""
    held = generation.bytes
    return {
        "id": generation.request_id,
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "finish": generation.finish,
        "prompt_tokens": generation.prompt_tokens,
        "new_tokens": generation.new_tokens,
        "resident_prompt_bytes": held.prompt,
        "resident_decode_bytes": held.decode,
        "full_prompt_bytes": held.full_prompt,
        "full_bytes": held.full,
        "resident_byte_steps": held.resident_sum,
        "full_byte_steps": held.full_sum,
        "notes": list(generation.notes),
    }


class _Tally:
    """Running accuracy per entry, for the progress line only."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._counts = {name: [0, 0] for name in entries}

    def add(self, entry: str, correct: bool) -> None:
        self._counts[entry][0] += correct
        self._counts[entry][1] += 1

    def text(self) -> str:
        return ", ".join(f"{name} {k}/{n} right" for name, (k, n) in self._counts.items() if n)


def _judge(row: Row, text: str, answer_form: str) -> bool:
    try:
        return check(row, parse(text, answer_form)).correct
    except MalformedAnswer:
        return False


def evaluate(
    config: RunConfig,
    *,
    shard: int = 0,
    shards: int = 1,
    methods: Sequence[str] | None = None,
    threads: int = 1,
) -> list[str]:
    """Generate shard `shard` of `shards` under the run's entries (or those of `methods`).

    Writes results/<run>/predictions/<entry>/<i>-of-<shards>.jsonl and a manifest beside it; returns the
    paths. Raises PaskError for bad input, HarnessFault where the harness is at fault.
    """
    start = time.monotonic()
    torch.set_num_threads(threads)
    entries = config.select(methods)
    rows = load_rows()
    splits = Splits.read(keys.splits_file(config))
    sample = splits.sample(config.data.part, config.data.sample)
    ids = [row_id for group in sample.values() for row_id in group][shard::shards]
    model = load(config)
    folders = {e.name: keys.part_folder(config, e, model.digest) for e in entries}
    done = {name: parts.finished(folder) for name, folder in folders.items()}
    open_items = [(i, tuple(e for e in entries if i not in done[e.name])) for i in ids]
    open_items = [(i, missing) for i, missing in open_items if missing]
    total = len(ids) * len(entries)
    left = sum(len(missing) for _, missing in open_items)
    what = f"evaluate {config.run} shard {shard + 1}/{shards}"
    tally = _Tally(e.name for e in entries)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(what, total, done=total - left))
        writers = {
            e.name: stack.enter_context(
                parts.open_part(folders[e.name] / f"{keys.shard_name(shard, shards)}.jsonl")
            )
            for e in entries
            if any(e in missing for _, missing in open_items)
        }
        for generation in generate(
            model,
            _tasks(config, model, rows, open_items),
            Limits(config.max_new_tokens, config.model.expected_new_tokens),
            max_batch=config.engine.max_batch,
            kv_dtype=getattr(torch, config.engine.kv_dtype),
        ):
            record = record_of(generation)
            writers[generation.entry].append(record)
            done[generation.entry][record["id"]] = record
            row = rows[record["id"]]
            tally.add(generation.entry, _judge(row, record["text"], config.model.answer_form))
            progress.advance(detail=tally.text())
    written = []
    for entry in entries:
        path = keys.prediction_file(config, entry, shard, shards)
        with whole_file(path) as out:
            for i in ids:
                line = json.dumps(done[entry.name][i], sort_keys=True, ensure_ascii=False)
                out.write(line + "\n")
        decisive = keys.key_parts(config, entry, model.digest)
        write_json(
            path.with_suffix(".manifest.json"),
            {
                "run": config.run,
                "entry": entry.name,
                "shard": keys.shard_name(shard, shards),
                "items": len(ids),
                "items_computed_now": sum(entry in missing for _, missing in open_items),
                "decided_by": decisive,
                "key": digest(decisive),
                "splits": splits.digest,
                "commit": revision(),
                "machine": machine(),
                "threads": threads,
                "wall_seconds": round(time.monotonic() - start, 1),
            },
        )
        written.append(str(path))
    return written


def _tasks(
    config: RunConfig,
    model: LoadedModel,
    rows: dict[str, Row],
    open_items: Iterable[tuple[str, tuple[Entry, ...]]],
) -> Iterator[Task]:
    """Built one at a time, as decoding asks for them: a compiled grammar is not kept for long."""
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    for row_id, entries in open_items:
        yield Task(
            builder.build(rows[row_id]),
            tuple((entry.name, keys.method_of(entry)) for entry in entries),
        )
