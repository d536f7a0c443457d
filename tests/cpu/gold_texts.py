"""Texts to try a grammar with: the gold answers of BFCL rows, written in many ways."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pask.bfcl.answers import Call, render
from pask.bfcl.data import Row

# A JSON text's parts: strings, brackets, separators, numbers and words, the blocks' tags.
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]|, |: |</?tool_call>|\n|[^\[\]{},:"\n<]+')
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
ODD_NUMBERS = (
    *("-1", "-0", "0", "00", "007", "1.0", "-0.5", "1e5", "1E+5", "2e-07", "1.", ".5", "+1"),
    *("1e", "-", "0x1", "1_0", "NaN", "null", "true", "12345678901234567890"),
)
_BLANKS = (" ", "\n", "\t", "  ")


def gold_calls(row: Row) -> Iterator[list[Call]]:
    """The calls of first choices; then, for each argument, each of its other alternatives once,
    and without the argument where it may be left out."""
    first = [_first(gold) for gold in row.gold]
    yield first
    for at, gold in enumerate(row.gold):
        ((name, arguments),) = gold.items()
        for argument, alternatives in arguments.items():
            for alternative in alternatives:
                for value in _spellings(alternative):
                    changed = dict(first[at][name])
                    if alternative == "":  # may be left out
                        changed.pop(argument, None)
                    else:
                        changed[argument] = value
                    if changed != first[at][name]:
                        yield [*first[:at], {name: changed}, *first[at + 1 :]]


def _first(gold: dict[str, dict[str, list[Any]]]) -> Call:
    ((name, arguments),) = gold.items()
    return {
        name: {
            argument: next(iter(_spellings(alternatives[0])))
            for argument, alternatives in arguments.items()
            if alternatives and alternatives[0] != ""
        }
    }


def _spellings(value: Any) -> list[Any]:
    """A gold value's plain forms; in its objects every key has alternatives of its own."""
    if isinstance(value, list):
        return [[spelling for item in value for spelling in _spellings(item)[:1]]]
    if not isinstance(value, dict):
        return [value]
    longest = max((len(v) if isinstance(v, list) else 1 for v in value.values()), default=1)
    forms = []
    for at in range(longest):
        form = {}
        for key, choices in value.items():
            chosen = choices[min(at, len(choices) - 1)] if isinstance(choices, list) else choices
            if chosen != "":
                form[key] = _spellings(chosen)[0]
        forms.append(form)
    return forms


def other_serialisations(
    calls: list[Call], answer_form: str, functions: Any
) -> Iterator[tuple[str, str]]:
    """(what is unusual, text) of the same calls, most of them not in the fixed layout."""
    text = render(calls, answer_form, functions)
    yield "escaped letters", _ascii(text)
    for kind, insides in (
        ("escapes", ("\\/", "\\u0041", "\\uabCD", "\\b\\f\\n\\r\\t", '\\"\\\\', "\\ud83d")),
        ("no escapes", ("\\x41", "\\u12g", "\\'", "\\u 123")),
        ("raw characters", ("é", "日本", "😀", "\x7f", "\u2028", "/", "'")),
        ("control characters", ("\t", "\x00", "\n", "\x1f")),
    ):
        for inside in insides:
            if (changed := _in_values(text, inside)) != text:
                yield kind, changed
    backwards = [{name: dict(reversed(arguments.items()))} for call in calls
                 for name, arguments in call.items()]  # fmt: skip
    yield "key order", render(backwards, answer_form)
    yield "key order", render(calls[::-1], answer_form, functions)
    parts = list(_PART.finditer(text))
    seen: set[tuple[str, str]] = set()
    for before, part in zip([None, *parts], [*parts, None], strict=True):
        place = (_kind(before), _kind(part))
        if place not in seen:
            seen.add(place)
            at = part.start() if part else len(text)
            blank = _BLANKS[len(seen) % len(_BLANKS)]
            yield f"blank between {place[0]} and {place[1]}", text[:at] + blank + text[at:]
    for separator in (", ", ": "):
        yield "no blank", text.replace(separator, separator[0])
    numbers = [match for match in parts if _NUMBER.fullmatch(match[0])]
    for match in numbers[:4]:
        for number in ODD_NUMBERS:
            yield "numbers", text[: match.start()] + number + text[match.end() :]


def _in_values(text: str, inside: str) -> str:
    """The text with `inside` at the start of its arguments' strings, in their values."""
    parts = [match[0] for match in _PART.finditer(text)]
    for at, part in enumerate(parts):
        is_key = parts[at + 1 : at + 2] == [": "]
        is_name = parts[at - 2 : at] == ['"name"', ": "] and parts[at - 3] == "{"
        if part[0] == '"' and not is_key and not is_name:
            parts[at] = '"' + inside + part[1:]
    return "".join(parts)


def _ascii(text: str) -> str:
    return "".join(c if ord(c) < 128 else json.dumps(c)[1:-1] for c in text)


def _kind(part: re.Match[str] | None) -> str:
    if part is None:
        return "edge"
    first = part[0][0]
    return "string" if first == '"' else first if first in "[]{},:<\n" else "literal"
