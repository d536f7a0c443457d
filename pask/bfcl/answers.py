"""Calls <-> text, in the two answer forms.

A call is what BFCL's checker takes: `{function_name: {argument: value}}`. The layout is fixed:
separators ", " and ": ", no other white space, text as it is (no \\u escapes for letters).
- "json_list": `[{"name": "f", "arguments": {"a": 1}}, ...]`
- "tool_call": `<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>`, joined by "\\n".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pask.bfcl.schema import JsonSchema, arguments_schema
from pask.errors import PaskError, known_names

ANSWER_FORMS = ("json_list", "tool_call")
SEPARATORS = (", ", ": ")
BLOCK_BEGIN = "<tool_call>\n"
BLOCK_END = "\n</tool_call>"
BLOCK_SEPARATOR = "\n"

Call = dict[str, dict[str, Any]]


class MalformedAnswer(ValueError):
    """The text is not an answer: cut off at the output limit, or holding what JSON cannot.

    The model's wrong answer, to be scored as such; never an error of the user or of the harness.
    """


def check_answer_form(answer_form: str) -> str:
    """The form itself where it is known, else PaskError."""
    if answer_form not in ANSWER_FORMS:
        raise PaskError(
            f"unknown answer form {answer_form!r}", todo=known_names(answer_form, ANSWER_FORMS)
        )
    return answer_form


def render(
    calls: Sequence[Mapping[str, Mapping[str, Any]]],
    answer_form: str,
    functions: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The text of one or more calls.

    With `functions`, argument keys (nested ones too) come in the order of their documents, as the
    grammar wants them; keys that a document does not know come last, in the given order.
    Raises ValueError for no calls and for a call that is not one name with its arguments, and
    ValueError or TypeError for a value that JSON cannot hold.
    """
    check_answer_form(answer_form)
    schemas = {f["name"]: arguments_schema(f) for f in functions or ()}
    if not calls:
        raise ValueError("an answer holds at least one call")
    texts = []
    for call in calls:
        if len(call) != 1:
            raise ValueError(f"a call is one name with its arguments, not {sorted(call)}")
        ((name, arguments),) = call.items()
        if name in schemas:
            arguments = _ordered(arguments, schemas[name])
        texts.append(dumps({"name": name, "arguments": arguments}))
    if answer_form == "json_list":
        return "[" + SEPARATORS[0].join(texts) + "]"
    return BLOCK_SEPARATOR.join(BLOCK_BEGIN + text + BLOCK_END for text in texts)


def dumps(value: Any) -> str:
    """`value` as JSON in the fixed layout; ValueError for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=SEPARATORS)


def parse(text: str, answer_form: str) -> list[Call]:
    """The calls of an answer, in order; white space inside the JSON is not judged.

    Raises MalformedAnswer for anything but one or more whole calls in this form: text around them,
    other keys, a key twice in an object, a number or a character that cannot be stored.
    """
    if check_answer_form(answer_form) == "json_list":
        items = _loads(text)
        if not isinstance(items, list) or not items:
            raise MalformedAnswer("not a list of one or more calls")
    else:
        items = [_loads(block) for block in _blocks(text)]
    return [_call(item) for item in items]


def _ordered(value: Any, schema: JsonSchema) -> Any:
    if isinstance(value, Mapping):
        properties = schema.get("properties", {})
        keys = [key for key in properties if key in value]
        keys += [key for key in value if key not in properties]
        return {key: _ordered(value[key], properties.get(key, {})) for key in keys}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_ordered(item, schema.get("items", {})) for item in value]
    return value


def _blocks(text: str) -> list[str]:
    """The JSON of each block. A JSON string holds no raw line break, so lines tell them apart."""
    lines = text.split("\n")
    begin, end = BLOCK_BEGIN.strip(), BLOCK_END.strip()
    if len(lines) % 3 or any(line != begin for line in lines[::3]):
        raise MalformedAnswer(f"not a row of whole {begin} blocks")
    if any(line != end for line in lines[2::3]):
        raise MalformedAnswer(f"a block is not closed by {end}")
    return lines[1::3]


def _loads(text: str) -> Any:
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be stored
    except MalformedAnswer:
        raise
    except (ValueError, RecursionError) as error:
        raise MalformedAnswer(f"not JSON: {error}") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedAnswer("a key comes twice in one object")
    return found


def _constant(name: str) -> Any:
    raise MalformedAnswer(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise MalformedAnswer(f"the number {text[:20]} is too large")
    return value


def _int(text: str) -> int:
    _float(text)  # the checker makes floats of integers: what no float can hold is no answer
    return int(text)


def _call(item: Any) -> Call:
    if not isinstance(item, dict) or set(item) != {"name", "arguments"}:
        raise MalformedAnswer("a call is an object with the keys name and arguments")
    if not isinstance(item["name"], str) or not isinstance(item["arguments"], dict):
        raise MalformedAnswer("a call's name is a string and its arguments are an object")
    return {item["name"]: item["arguments"]}
