"""Labelled pieces: a prompt as the list of its parts, each saying what it is.

A prompt is put together from pieces, never cut apart afterwards, so a token's label follows from
the request's own construction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pask.structure.labels import Label


@dataclass(frozen=True)
class Piece:
    """A stretch of prompt text and what it is."""

    text: str
    label: Label

    def __post_init__(self) -> None:
        if not isinstance(self.label, Label):
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
# that is not listed takes the entry None. `pask.structure.labels` says whose the punctuation is.
_KINDS: dict[str, dict[str | None, tuple[Label, str | None]]] = {
    "tool": {"function": (Label.TOOL_SCAFFOLD, "function"), None: (Label.TOOL_SCAFFOLD, None)},
    "function": {
        "name": (Label.FUNCTION_NAME, None),
        "description": (Label.FUNCTION_DESCRIPTION, None),
        "parameters": (Label.TOOL_SCAFFOLD, "schema"),
        None: (Label.TOOL_SCAFFOLD, None),
    },
    "schema": {
        "description": (Label.PARAMETER_DESCRIPTION, None),
        "properties": (Label.TOOL_SCAFFOLD, "properties"),
        "items": (Label.TOOL_SCAFFOLD, "schema"),
        "type": (Label.TYPE, None),
        "enum": (Label.ENUM, None),
        "default": (Label.DEFAULT, None),
        "required": (Label.REQUIRED, None),
        None: (Label.OTHER_CONSTRAINT, None),
    },
    "properties": {None: (Label.TOOL_SCAFFOLD, "schema")},
}
# Labelled as whole members, key and punctuation included.
_CONSTRAINTS = frozenset(
    {Label.TYPE, Label.ENUM, Label.DEFAULT, Label.REQUIRED, Label.OTHER_CONSTRAINT}
)


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
        yield Piece("{}", Label.TOOL_SCAFFOLD)
        return
    comma, inner, outer = (
        (", ", "", "")
        if indent is None
        else (",", "\n" + " " * indent * (depth + 1), "\n" + " " * indent * depth)
    )
    opening = "{" + inner
    for key, value in document.items():
        label, value_kind = _KINDS[kind].get(key, _KINDS[kind][None])
        yield Piece(opening, Label.TOOL_SCAFFOLD)
        yield from _key(key, Label.PARAMETER_KEY if kind == "properties" else label)
        if value_kind is not None and isinstance(value, Mapping):
            yield from _object(value, value_kind, indent, depth + 1)
        else:
            yield from _value(value, label, indent, depth + 1)
        opening = comma + inner
    yield Piece(outer + "}", Label.TOOL_SCAFFOLD)


def _key(key: str, label: Label) -> Iterator[Piece]:
    text = _dumps(key)
    if label in _CONSTRAINTS:
        yield Piece(text + ": ", label)
    elif label == Label.PARAMETER_KEY:
        yield from _quoted(text, label)
        yield Piece(": ", Label.TOOL_SCAFFOLD)
    else:
        yield Piece(text + ": ", Label.TOOL_SCAFFOLD)


def _value(value: Any, label: Label, indent: int | None, depth: int) -> Iterator[Piece]:
    text = _dumps(value)
    if isinstance(value, str) and label not in _CONSTRAINTS:
        yield from _quoted(text, label)
    else:
        if indent is not None:
            text = json.dumps(value, ensure_ascii=False, indent=indent)
            text = text.replace("\n", "\n" + " " * indent * depth)
        yield Piece(text, label)


def _quoted(text: str, label: Label) -> Iterator[Piece]:
    yield Piece('"', Label.TOOL_SCAFFOLD)
    yield Piece(text[1:-1], label)
    yield Piece('"', Label.TOOL_SCAFFOLD)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
