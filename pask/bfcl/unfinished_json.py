"""Reads the beginning of a JSON value that is not whole yet, in the answers' fixed layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from json.decoder import JSONDecoder, scanstring  # type: ignore[attr-defined]
from typing import Any

from pask.bfcl.answers import SEPARATORS

_DECODER = JSONDecoder()
_AFTER_A_NUMBER = (",", "}", "]", " ", "\n")
_WHOLE_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A JSON value whose end is not written yet.

    `text`: of a string; `items`: of a list; `members`: of a dict, `key`: the beginning of its next
    one. The last item and the last member's value may be unfinished. None of these: a number or
    word, or nothing at all.
    """

    text: str | None = None
    items: Sequence[Any] | None = None
    members: Sequence[tuple[str, Any]] = ()
    key: str | None = None  # None: this is not a dict


NOTHING = Unfinished()


def read(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, whole or unfinished, and where it ends; ValueError for what
    begins none."""
    if at >= len(text):
        return NOTHING, at
    first = text[at]
    try:
        value, after = _DECODER.raw_decode(text, at)
    except ValueError:
        return _read_unfinished(text, at), len(text)
    if first in "-0123456789" and text[after : after + 1] not in _AFTER_A_NUMBER:
        return NOTHING, len(text)
    return value, after


def _read_unfinished(text: str, at: int) -> Unfinished:
    first = text[at]
    if first == '"':
        return Unfinished(text=_characters(text, at))
    if first in "-0123456789tfn":
        return NOTHING
    if first not in "[{":
        raise ValueError(f"nothing begins with {first!r}")
    items: list[Any] = []
    members: list[tuple[str, Any]] = []
    key, at = "", at + 1
    while at < len(text):
        if first == "{":
            key, at = read(text, at)
            if isinstance(key, Unfinished):
                return Unfinished(members=members, key=key.text or "")
            if not isinstance(key, str):
                raise ValueError("a key is a string")
            if at >= len(text) or begins(SEPARATORS[1], text, at):
                return Unfinished(members=[*members, (key, NOTHING)], key="")
            at = expect(SEPARATORS[1], text, at)
        value, at = read(text, at)
        items.append(value)
        members.append((key, value))
        if at >= len(text):
            break
        if begins(SEPARATORS[0], text, at):
            items.append(NOTHING)
            break
        at = expect(SEPARATORS[0], text, at)
        if at >= len(text):
            items.append(NOTHING)
    return Unfinished(members=members, key="") if first == "{" else Unfinished(items=items)


def _characters(text: str, at: int) -> str:
    """The whole characters of an unfinished string whose quote is at `at`."""
    body = text[at + 1 :]
    if "\\" in body:
        found = _WHOLE_CHARACTERS.match(body)
        body = found.group() if found else ""
    value: str = scanstring(body + '"', 0, True)[0]
    # Half of a character may be written as \ud83d, the other half as another such escape.
    return value[:-1] if value and "\ud800" <= value[-1] <= "\udbff" else value


def begins(whole: str, text: str, at: int) -> bool:
    """Whether the rest of the text is less than all of `whole`: a beginning of it."""
    return len(text) - at < len(whole) and whole.startswith(text[at:])


def expect(whole: str, text: str, at: int) -> int:
    """Where `whole` ends, which has to be at `at`; else ValueError."""
    if not text.startswith(whole, at):
        raise ValueError(f"no {whole!r} at {at}")
    return at + len(whole)
