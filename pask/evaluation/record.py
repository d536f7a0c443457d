"""One finished item as a line of a part file: which fields it has and where they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # reading records must not cost a torch import
    from pask.engine.generation import Generation

Record = dict[str, Any]

# What every record holds, with its JSON type.
FIELDS: dict[str, type] = {
    "id": str,
    "text": str,
    "token_ids": list,
    "finish": str,
    "prompt_tokens": int,
    "new_tokens": int,
    "resident_prompt_bytes": int,
    "resident_decode_bytes": int,
    "full_prompt_bytes": int,
    "full_bytes": int,
    "resident_byte_steps": int,
    "read_byte_steps": int,
    "full_byte_steps": int,
    "notes": list,
}


def record_of(generation: Generation) -> Record:
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
        "read_byte_steps": held.read_sum,
        "full_byte_steps": held.full_sum,
        "notes": list(generation.notes),
    }


def check_record(record: Record) -> None:
    """Raise KeyError or TypeError where a field is missing or of another type."""
    for name, kind in FIELDS.items():
        if not isinstance(record[name], kind):
            raise TypeError(f"{name} is {record[name]!r}")
