"""Whole files or none: written beside the target, then renamed over it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pask.errors import PaskError


@contextmanager
def whole_file(path: Path) -> Iterator[IO[str]]:
    """A text file that appears under `path` only when the block ends without an error.

    PaskError, naming `path`, where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as out:
                yield out
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise PaskError(
            "the file cannot be written",
            where=str(path),
            why=error.strerror or type(error).__name__,
            todo="make room for it: no file may have a folder's name, no folder a file's",
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with whole_file(path) as out:
        out.write(text)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON with sorted keys, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
