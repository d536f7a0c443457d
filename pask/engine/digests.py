"""sha256 of files and of model folders."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pask.engine.weights import weight_files
from pask.errors import PaskError

# Everything beside the weights that a result can depend on.
_TEXT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file; PaskError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PaskError("not readable", where=str(path), why=str(error.strerror)) from error


def folder_digest(folder: Path) -> str:
    """Hex sha256 over names and contents of a model folder's weights, config and tokenizer."""
    texts = [folder / name for name in _TEXT_FILES if (folder / name).is_file()]
    lines = [f"{file_sha256(path)}  {path.name}\n" for path in (*weight_files(folder), *texts)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
