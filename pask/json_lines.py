"""Append-only files of JSON lines: one line a finished item, safe against a kill at any moment."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pask.errors import PaskError


def line_of(record: Mapping[str, Any]) -> str:
    """A record as its line: keys sorted, so that equal records are equal bytes."""
    return json.dumps(record, sort_keys=True, ensure_ascii=False) + "\n"


class LineWriter:
    """Appends records to one locked file, each flushed to disk before `append` returns."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def append(self, record: Mapping[str, Any]) -> None:
        self._out.write(line_of(record).encode())
        self._out.flush()
        os.fsync(self._out.fileno())


def read_lines(
    path: Path, check: Callable[[Any], None], *, unit: str = "items"
) -> list[dict[str, Any]]:
    """The finished records of a file.

    A last line without its newline was torn by a kill: it is not finished and is left out. A broken
    line anywhere else, or one that `check` refuses (ValueError, TypeError, KeyError), is damage
    from outside and raises PaskError. FileNotFoundError for no file.
    """
    data = path.read_bytes()
    records = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            record = json.loads(line)
            check(record)
        except (ValueError, TypeError, KeyError) as error:
            raise PaskError(
                f"line {number} is damaged",
                where=str(path),
                why=f"{type(error).__name__}: {error}",
                todo=f"delete the file: its {unit} are computed again",
            ) from error
        records.append(record)
    return records


@contextmanager
def open_lines(path: Path) -> Iterator[LineWriter]:
    """Open a file for appending, cut a torn last line off it, and hold its lock.

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
        yield LineWriter(out)
