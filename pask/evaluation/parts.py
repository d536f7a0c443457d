"""Append-only part files: one JSON line per finished item, safe against a kill at any moment."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pask.errors import PaskError
from pask.evaluation.record import Record, check_record


def line_of(record: Record) -> str:
    """A record as its line: keys sorted, so that equal records are equal bytes."""
    return json.dumps(record, sort_keys=True, ensure_ascii=False) + "\n"


def read_part(path: Path) -> list[Record]:
    """The finished records of a part file.

    A last line without its newline was torn by a kill: its item is not finished and is left out.
    A broken line anywhere else is damage from outside and raises PaskError.
    """
    data = path.read_bytes()
    records = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            record = json.loads(line)
            check_record(record)
        except (ValueError, TypeError, KeyError) as error:
            raise PaskError(
                f"line {number} is damaged",
                where=str(path),
                why=f"{type(error).__name__}: {error}",
                todo="delete the file: its items are computed again",
            ) from error
        records.append(record)
    return records


def finished(folder: Path) -> dict[str, Record]:
    """Every finished record below a key's folder, by item id, whatever shard wrote it."""
    done: dict[str, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in read_part(path):
            done.setdefault(record["id"], record)
    return done


class PartWriter:
    """Appends records to one locked part file, each flushed to disk before `append` returns."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def append(self, record: Record) -> None:
        self._out.write(line_of(record).encode())
        self._out.flush()
        os.fsync(self._out.fileno())


@contextmanager
def open_part(path: Path) -> Iterator[PartWriter]:
    """Open a part file for appending, cut a torn last line off it, and hold its lock.

    Raises PaskError where another process holds it: two writers never mix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PaskError(
                "another evaluation is writing this file",
                where=str(path),
                todo=f"wait for it, or find it with: fuser {path}",
            ) from None
        out.seek(0)
        whole = out.read().rfind(b"\n") + 1
        out.truncate(whole)
        yield PartWriter(out)
