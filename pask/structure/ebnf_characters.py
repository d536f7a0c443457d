"""Characters in EBNF's notation: escapes, classes, and their UTF-8 as ranges of bytes.

Code points are all those up to U+10FFFF. Surrogates count, as they do for xgrammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pask.errors import PaskError

CodePoints = tuple[int, int]  # a range, both ends included
ByteRange = tuple[int, int]  # likewise

LAST_CODE_POINT = 0x10FFFF

_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]+|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|[^\\]", re.DOTALL)
_PLAIN_ESCAPES = dict(zip("'\"?\\abfnrtv0e", "'\"?\\\a\b\f\n\r\t\v\0\x1b", strict=True))
_CLASS_ESCAPES = _PLAIN_ESCAPES | {mark: mark for mark in "^$\\.*+?()[]{}|/-"}
_DASH = ("-", True)  # one that stands bare


def literal_bytes(token: str, where: str) -> bytes:
    """The UTF-8 of a literal `"..."`; PaskError, at `where`, for an escape that is none."""
    characters = "".join(character for character, _ in _unescaped(token, _PLAIN_ESCAPES, where))
    return characters.encode("utf-8", "surrogatepass")


def class_ranges(token: str, where: str) -> tuple[CodePoints, ...]:
    """The code points of a class `[...]` or `[^...]`: ranges in order, with gaps between them."""
    characters = list(_unescaped(token, _CLASS_ESCAPES, where))
    negated = characters[:1] == [("^", True)]
    left = characters[negated:]
    spans: list[CodePoints] = []
    while left:
        (first, bare), *left = left
        if bare and first == "-" and left and (spans or left[0] == _DASH):
            raise PaskError(
                f"the - in {token} could be a range or itself",
                where=where,
                todo="write \\- for itself",
            )
        last = first
        if len(left) > 1 and left[0] == _DASH != left[1]:
            last, left = left[1][0], left[2:]
        if last < first:
            raise PaskError(f"the range {first}-{last} is upside down", where=where)
        spans.append((ord(first), ord(last)))
    ranges = _complement(_sorted(spans)) if negated else _sorted(spans)
    if not ranges:
        raise PaskError(
            f"no character is in the class {token}", where=where, todo="name one, or drop it"
        )
    return tuple(ranges)


def _sorted(spans: list[CodePoints]) -> list[CodePoints]:
    merged: list[CodePoints] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _complement(ranges: list[CodePoints]) -> list[CodePoints]:
    starts = [0, *(last + 1 for _, last in ranges)]
    ends = [*(first - 1 for first, _ in ranges), LAST_CODE_POINT]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start <= end]


def byte_chains(first: int, last: int) -> Iterator[tuple[ByteRange, ...]]:
    """The UTF-8 of the code points `first` to `last`, as sequences of byte ranges."""
    for end in (0x7F, 0x7FF, 0xFFFF, last):
        if first <= min(end, last):
            yield from _same_length(_utf8(first), _utf8(min(end, last)))
            first = min(end, last) + 1


def _same_length(low: bytes, high: bytes) -> Iterator[tuple[ByteRange, ...]]:
    if len(low) == 1:
        yield ((low[0], high[0]),)
    elif low[0] == high[0]:
        for rest in _same_length(low[1:], high[1:]):
            yield (low[0], low[0]), *rest
    else:
        # Lead bytes whose following bytes are not free, at either end, go apart.
        lowest, highest = bytes([0x80] * (len(low) - 1)), bytes([0xBF] * (len(low) - 1))
        start, stop = low[0], high[0]
        if low[1:] != lowest:
            yield from _same_length(low, low[:1] + highest)
            start += 1
        if high[1:] != highest:
            stop -= 1
        if start <= stop:
            yield (start, stop), *(((0x80, 0xBF),) * (len(low) - 1))
        if high[1:] != highest:
            yield from _same_length(high[:1] + lowest, high)


def _utf8(code_point: int) -> bytes:
    return chr(code_point).encode("utf-8", "surrogatepass")


def _unescaped(token: str, escapes: Mapping[str, str], where: str) -> Iterator[tuple[str, bool]]:
    """The characters between the token's two marks, and whether each stands there bare."""
    for match in _ESCAPE.finditer(token, 1, len(token) - 1):
        piece = match.group()
        if piece[0] != "\\":
            yield piece, True
        elif piece[1] in "xuU" and len(piece) > 2:
            if piece[1] == "x" and len(piece) != 4:
                # xgrammar reads on over all hexadecimal digits that follow.
                raise PaskError(
                    f"{piece} needs exactly two digits, and no such digit may follow it",
                    where=where,
                    todo="write \\uHHHH",
                )
            if int(piece[2:], 16) > LAST_CODE_POINT:
                raise PaskError(f"{piece} is no code point", where=where)
            yield chr(int(piece[2:], 16)), False
        elif piece[1] in escapes:
            yield escapes[piece[1]], False
        else:
            raise PaskError(
                f"there is no escape {piece}", where=where, todo="write \\\\ for a backslash"
            )
