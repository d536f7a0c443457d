"""Reads the part files of an evaluation: one JSON line per finished item (`pask.json_lines`)."""

from __future__ import annotations

import json
from pathlib import Path

from pask.errors import PaskError
from pask.evaluation.record import Record, check_record


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
