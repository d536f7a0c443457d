"""Work on a part's rows whose every row gives one JSON line: sharded, and resumed after a kill.

Finished lines are appended to part files at once, below a folder whose name is the digest of all
that decides them; a shard's file is written from these when the shard is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pask.config import RunConfig
from pask.digests import digest
from pask.errors import HarnessFault, PaskError
from pask.evaluation.keys import RESULTS, shard_name
from pask.files import write_json, write_text
from pask.json_lines import line_of, open_lines, read_lines
from pask.progress import Progress
from pask.provenance import machine, revision

Line = dict[str, Any]
Measure = Callable[[Sequence[str]], Iterator[Line]]
"""The lines of rows, by id, in whatever order they are done."""


@dataclass(frozen=True)
class RowFiles:
    """results/<run>/<kind>/<i>-of-<n>.jsonl.

    `fields`: what every line holds, with its JSON type; "id" is the row's. `ids`: the part's rows
    in the split's order. `decided_by`: everything that decides a line. `todo`: how to make them.
    """

    config: RunConfig
    kind: str
    fields: Mapping[str, type]
    ids: Sequence[str]
    decided_by: Mapping[str, Any]
    todo: str

    def file(self, shard: int, shards: int) -> Path:
        name = f"{shard_name(shard, shards)}.jsonl"
        return RESULTS / self.config.run / self.kind / name

    def work(self, measure: Measure, *, shard: int, shards: int, **about: Any) -> Path:
        """Measure what shard `shard` of `shards` still lacks; write its file with a manifest beside
        it, in which `about` is noted. Errors as of `measure`."""
        start = time.monotonic()
        ids = self.ids[shard::shards]
        path = self.file(shard, shards)
        folder = path.parent / digest(self.decided_by)[:16]
        done = self._finished(folder)
        missing = [i for i in ids if i not in done]
        if missing:
            what = f"{self.kind} {self.config.run} shard {shard_name(shard, shards)}"
            with (
                Progress(what, len(ids), done=len(ids) - len(missing)) as progress,
                open_lines(folder / path.name) as writer,
            ):
                for line in measure(missing):
                    writer.append(line)
                    done[line["id"]] = line
                    progress.advance()
        write_text(path, "".join(line_of(done[i]) for i in ids))
        manifest = {
            "run": self.config.run,
            "model": self.config.model.name,
            "shard": shard_name(shard, shards),
            "items": len(ids),
            "items_computed_now": len(missing),
            "key": digest(self.decided_by),
            "decided_by": self.decided_by,
            "commit": revision(),
            "machine": machine(),
            "wall_seconds": round(time.monotonic() - start, 1),
        }
        write_json(path.with_suffix(".manifest.json"), manifest | about)
        return path

    def read(self, shards: int) -> list[Line]:
        """The lines of all rows, in the split's order.

        PaskError where a shard is missing or was measured under something else, HarnessFault where
        the shards do not hold every row once.
        """
        found: dict[str, Line] = {}
        for shard in range(shards):
            path = self.file(shard, shards)
            lines = self._lines(path)
            self._check_manifest(path)
            for line in lines:
                if line["id"] in found:
                    raise HarnessFault(f"{line['id']} is there twice", where=str(path))
                found[line["id"]] = line
        if found.keys() != set(self.ids):
            missing = len(set(self.ids) - found.keys())
            raise PaskError(
                f"{missing} of {len(self.ids)} rows are not measured, "
                f"{len(found.keys() - set(self.ids))} others are",
                where=str(self.file(0, shards).parent),
                todo=self.todo,
            )
        return [found[i] for i in self.ids]

    def _check_manifest(self, path: Path) -> None:
        wanted = json.loads(json.dumps(self.decided_by))
        try:
            manifest = json.loads(path.with_suffix(".manifest.json").read_text(encoding="utf-8"))
            made = dict(manifest["decided_by"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PaskError("it has no manifest", where=str(path), todo=self.todo) from error
        if other := sorted(key for key in wanted if made.get(key) != wanted[key]):
            what = f"it was measured under another {', '.join(other)}"
            raise PaskError(what, where=str(path), todo=self.todo)

    def _finished(self, folder: Path) -> dict[str, Line]:
        """Every finished line below a key's folder, by row id, whatever shard wrote it."""
        done: dict[str, Line] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in self._lines(path):
                done.setdefault(line["id"], line)
        return done

    def _lines(self, path: Path) -> list[Line]:
        """A file's lines; one that a kill has torn, the last, is left out."""
        try:
            return read_lines(path, self._check_fields, unit="rows")
        except FileNotFoundError:
            what = "nothing was measured yet"
            raise PaskError(what, where=str(path), todo=self.todo) from None

    def _check_fields(self, line: Any) -> None:
        for name, kind in self.fields.items():
            if not isinstance(line[name], kind):
                raise TypeError(f"{name} is {line[name]!r}")
