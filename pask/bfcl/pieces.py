"""Labelled pieces: a prompt as the list of its parts, each saying what it is.

A prompt is put together from pieces, never cut apart afterwards, so a token's label follows from
the request's own construction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LABELS = (
    "chat_scaffold",  # what the chat template adds: role marks, its default system text
    "instruction",  # how to answer
    "worked_example",
    "tool_scaffold",  # JSON punctuation and fixed keys of a tool document, text around the list
    "function_name",
    "function_description",
    "parameter_key",
    "constraint",  # type, enum, default, required and the like: key and value
    "parameter_description",
    "user",  # the row's own messages, a system message of the row's included
)


@dataclass(frozen=True)
class Piece:
    """A stretch of prompt text and what it is."""

    text: str
    label: str

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"unknown label {self.label!r}")


@dataclass(frozen=True)
class Prompt:
    """A whole prompt: its text and the pieces that make it up, none empty."""

    text: str
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if "".join(piece.text for piece in self.pieces) != self.text:
            raise ValueError("the pieces do not make up the text")


def joined(pieces: Iterable[Piece]) -> str:
    """The text that the pieces make up."""
    return "".join(piece.text for piece in pieces)


def merged(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same text, empty pieces dropped and neighbours of one label made one."""
    out: list[Piece] = []
    for piece in pieces:
        if out and out[-1].label == piece.label:
            out[-1] = Piece(out[-1].text + piece.text, piece.label)
        elif piece.text:
            out.append(piece)
    return tuple(out)


# For each kind of object in a tool document: key -> (label of the value, kind of the value). A key
# that is not listed takes the entry None. The value of a described key loses its quotes to the
# scaffold; a constraint keeps its key and all of its punctuation.
_KINDS: dict[str, dict[str | None, tuple[str, str | None]]] = {
    "tool": {"function": ("tool_scaffold", "function"), None: ("tool_scaffold", None)},
    "function": {
        "name": ("function_name", None),
        "description": ("function_description", None),
        "parameters": ("tool_scaffold", "schema"),
        None: ("tool_scaffold", None),
    },
    "schema": {
        "description": ("parameter_description", None),
        "properties": ("tool_scaffold", "properties"),
        "items": ("tool_scaffold", "schema"),
        None: ("constraint", None),
    },
    "properties": {None: ("tool_scaffold", "schema")},
}


def document_pieces(
    document: Mapping[str, Any], kind: str, indent: int | None = None
) -> tuple[Piece, ...]:
    """A tool document as labelled JSON; the text is `json.dumps(document, ensure_ascii=False)`'s.

    `kind`: "function" for `{"name", "description", "parameters"}`, "tool" for the OpenAI wrapping
    `{"type": "function", "function": {...}}`; `indent` as in json.dumps.
    """
    return merged(_object(document, kind, indent, 0))


def _object(
    document: Mapping[str, Any], kind: str, indent: int | None, depth: int
) -> Iterator[Piece]:
    if not document:
        yield Piece("{}", "tool_scaffold")
        return
    comma, inner, outer = (
        (", ", "", "")
        if indent is None
        else (",", "\n" + " " * indent * (depth + 1), "\n" + " " * indent * depth)
    )
    opening = "{" + inner
    for key, value in document.items():
        label, value_kind = _KINDS[kind].get(key, _KINDS[kind][None])
        yield Piece(opening, "tool_scaffold")
        yield from _key(key, "parameter_key" if kind == "properties" else label)
        if value_kind is not None and isinstance(value, Mapping):
            yield from _object(value, value_kind, indent, depth + 1)
        else:
            yield from _value(value, label, indent, depth + 1)
        opening = comma + inner
    yield Piece(outer + "}", "tool_scaffold")


def _key(key: str, label: str) -> Iterator[Piece]:
    text = _dumps(key)
    if label == "constraint":
        yield Piece(text + ": ", label)
    elif label == "parameter_key":
        yield from _quoted(text, label)
        yield Piece(": ", "tool_scaffold")
    else:
        yield Piece(text + ": ", "tool_scaffold")


def _value(value: Any, label: str, indent: int | None, depth: int) -> Iterator[Piece]:
    text = _dumps(value)
    if isinstance(value, str) and label != "constraint":
        yield from _quoted(text, label)
    else:
        if indent is not None:
            text = json.dumps(value, ensure_ascii=False, indent=indent)
            text = text.replace("\n", "\n" + " " * indent * depth)
        yield Piece(text, label)


def _quoted(text: str, label: str) -> Iterator[Piece]:
    yield Piece('"', "tool_scaffold")
    yield Piece(text[1:-1], label)
    yield Piece('"', "tool_scaffold")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
