"""Reads the part files of an evaluation: one JSON line per finished item (`pask.json_lines`)."""

from __future__ import annotations

from pathlib import Path

from pask.evaluation.record import Record, check_record
from pask.json_lines import read_lines


def read_part(path: Path) -> list[Record]:
    """The finished records of a part file.

    A last line without its newline was torn by a kill: its item is not finished and is left out.
    A broken line anywhere else is damage from outside and raises PaskError.
    """
    return read_lines(path, check_record)


def finished(folder: Path) -> dict[str, Record]:
    """Every finished record below a key's folder, by item id, whatever shard wrote it."""
    done: dict[str, Record] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in read_part(path):
            done.setdefault(record["id"], record)
    return done
