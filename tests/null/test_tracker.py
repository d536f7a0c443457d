"""The tracker on function calls: hand-written tags, places, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pask.bfcl.tag_grammar import tag_grammar
from pask.errors import PaskError
from pask.structure.call_layout import CallLayout
from pask.structure.calls import CallGrammar
from pask.structure.tags import Choice, Next, Phase, Role, Tag, TokenClass
from pask.structure.tracker import IllegalBytes, Tracker
from tests.null.documents import document

WEATHER = document(
    "weather.now",
    ["city"],
    city={"type": "string"},
    unit={"type": "string", "enum": ["celsius", "cents"]},
    days={"type": "integer"},
)
WEEK = document(
    "weather.week",
    [],
    place={"type": "dict", "properties": {"lat": {"type": "float"}, "on": {"type": "boolean"}}},
    tags={"type": "array", "items": {"type": "string"}},
    extra={"type": "dict"},
    code={"type": "integer", "enum": [1, 12]},
)
FUNCTIONS = [WEATHER, WEEK]


def tags(tokens: list[str], functions: list[dict[str, Any]], form: str = "json_list") -> list[str]:
    tracker = Tracker(tag_grammar(functions, form))
    return [f"{token!r}: {tracker.accept(token.encode())}" for token in tokens]


def test_a_call_of_one_of_two_functions_in_a_list() -> None:
    tokens = [
        "[",
        '{"name": "',
        "weather",
        ".",
        "now",
        '", "',
        'arguments": {"',
        "city",
        '": "',
        "Rom",
    ]
    tokens += ['e"', ', "unit": "', "ce", "ls", 'ius"', "}}", "]"]
    assert tags(tokens, FUNCTIONS) == [
        "'[': (boundary, call_boundary, opening/forced, far)",
        '\'{"name": "\': (function_name, function_selector, opening/shared, near)',
        "'weather': (function_name, function_selector, inside/shared, near)",
        "'.': (function_name, function_selector, inside/shared, critical)",
        "'now': (function_name, function_selector, inside/free, far)",
        "'\", \"': (function_name, function_selector, closing/forced, far)",
        "'arguments\": {\"': (key, required_key, opening/forced, near)",
        "'city': (key, required_key, inside/forced, near)",
        "'\": \"': (string, required_value, opening/forced, critical)",
        "'Rom': (string, required_value, inside/free, critical)",
        "'e\"': (string, required_value, closing/free, critical)",
        '\', "unit": "\': (string, enum, opening/free, near)',
        "'ce': (string, enum, inside/shared, critical)",
        "'ls': (string, enum, inside/free, near)",
        "'ius\"': (string, enum, closing/forced, critical)",
        "'}}': (boundary, call_boundary, closing/free, critical)",
        "']': (boundary, call_boundary, closing/free, end)",
    ]


def test_nested_values_and_blocks() -> None:
    tokens = ["<tool_call>\n", '{"name": "weather.', 'week"', ', "arguments": {', '"place": ', "{"]
    tokens += ['"lat"', ": ", "-0", ".5", ', "on": ', "true", "}", ", ", '"tags"', ": ", "[", '"a"']
    tokens += [", ", '"b"', "]", ', "extra": ', "{", '"k": ', "null", "}", ', "code": ', "1", "2"]
    tokens += ["}", "}", "\n</tool_call>", "\n"]
    assert tags(tokens, FUNCTIONS, "tool_call") == [
        "'<tool_call>\\n': (boundary, call_boundary, opening/forced, far)",
        '\'{"name": "weather.\': (function_name, function_selector, opening/shared, critical)',
        "'week\"': (function_name, function_selector, closing/free, far)",
        "', \"arguments\": {': (boundary, argument_boundary, opening/forced, critical)",
        "'\"place\": ': (key, optional_key, whole/free, near)",
        "'{': (boundary, nested, opening/forced, critical)",
        "'\"lat\"': (key, nested, whole/free, near)",
        "': ': (scaffold, layout, inside/forced, critical)",
        "'-0': (number, nested, opening/free, critical)",
        "'.5': (number, nested, inside/free, critical)",
        "', \"on\": ': (key, nested, whole/free, critical)",
        "'true': (boolean, nested, whole/free, near)",
        "'}': (boundary, nested, closing/forced, critical)",
        "', ': (boundary, argument_boundary, inside/free, near)",
        "'\"tags\"': (key, optional_key, whole/free, near)",
        "': ': (scaffold, layout, inside/forced, near)",
        "'[': (boundary, nested, opening/forced, critical)",
        "'\"a\"': (string, nested, whole/free, critical)",
        "', ': (boundary, nested, inside/free, near)",
        "'\"b\"': (string, nested, whole/free, critical)",
        "']': (boundary, nested, closing/free, critical)",
        "', \"extra\": ': (key, optional_key, whole/free, near)",
        "'{': (boundary, nested, opening/forced, critical)",
        "'\"k\": ': (key, nested, whole/free, critical)",
        "'null': (null, nested, whole/free, critical)",
        "'}': (boundary, nested, closing/free, critical)",
        "', \"code\": ': (key, optional_key, whole/free, near)",
        "'1': (number, enum, opening/shared, critical)",
        "'2': (number, enum, closing/free, far)",
        "'}': (boundary, argument_boundary, closing/forced, far)",
        "'}': (boundary, call_boundary, closing/forced, far)",
        "'\\n</tool_call>': (boundary, call_boundary, closing/forced, critical)",
        "'\\n': (boundary, call_boundary, inside/free, far)",
    ]


def test_an_illegal_token_changes_nothing_and_says_what_would_have_been_legal() -> None:
    tracker = Tracker(tag_grammar(FUNCTIONS, "json_list"))
    tracker.accept(b'[{"name": "weather.')
    state = tracker.state
    with pytest.raises(IllegalBytes, match=r"byte 1 of b'wx' is not legal here; legal: e"):
        tracker.accept(b"wx")
    assert tracker.state is state
    tracker.accept(b'week", "arguments": {}}]')
    with pytest.raises(IllegalBytes, match="legal: nothing or the end"):
        tracker.accept(b" ")
    assert tracker.can_end


@pytest.mark.parametrize("count", [-1, 2, 100])
def test_more_cannot_be_taken_back_than_was_given(count: int) -> None:
    tracker = Tracker(tag_grammar(FUNCTIONS, "json_list"))
    tracker.accept(b"[")
    with pytest.raises(ValueError, match=f"cannot take back {count} of 1 tokens"):
        tracker.rollback(count)
    tracker.rollback(1)
    assert tracker.legal == frozenset(b"[")


def test_a_token_without_bytes_has_no_tag() -> None:
    with pytest.raises(ValueError, match="without bytes"):
        Tracker(tag_grammar(FUNCTIONS, "json_list")).accept(b"")
    with pytest.raises(TypeError, match="a token is bytes, not str"):
        Tracker(tag_grammar(FUNCTIONS, "json_list")).accept("[")  # type: ignore[arg-type]


def test_the_places_name_function_and_argument_as_far_as_they_are_decided() -> None:
    tracker = Tracker(tag_grammar(FUNCTIONS, "json_list"))
    tracker.accept(b'[{"name": "')
    assert [(p.role, p.path) for p in tracker.places] == [(Role.FUNCTION_SELECTOR, ())]
    tracker.accept(b'weather.week", "arguments": {"')
    assert [(p.role, p.path) for p in tracker.places] == [
        (Role.OPTIONAL_KEY, ("weather.week", key)) for key in ("code", "extra", "place", "tags")
    ]
    tracker.accept(b'place": {"lat": 1')
    assert {(p.role, p.path) for p in tracker.places} == {
        (Role.NESTED, ("weather.week", "place", "lat")),
        (Role.NESTED, ("weather.week", "place")),
    }


def test_next_counts_the_bytes_to_the_next_choice() -> None:
    grammar = tag_grammar([WEATHER], "json_list")
    tracker = Tracker(grammar)
    # One function: nothing is chosen before the city's first letter.
    forced = b'[{"name": "weather.now", "arguments": {"city": "'
    for at in range(len(forced)):
        tag = tracker.accept(forced[at : at + 1])
        ahead = len(forced) - at - 1
        expected = Next.FAR if ahead > 8 else Next.NEAR if ahead else Next.CRITICAL
        assert (tag.next, tag.choice) == (expected, Choice.FORCED)
    assert tracker.accept(b'Rome"}}]').next is Next.END


def test_a_tag_is_the_four_parts_of_equation_three() -> None:
    found = Tracker(tag_grammar([WEATHER], "json_list")).accept(b'[{"name": "weather.now"')
    assert found == Tag(
        TokenClass.FUNCTION_NAME,
        Role.FUNCTION_SELECTOR,
        Phase.WHOLE,
        Choice.FORCED,
        Next.FAR,
    )
    assert found.state == (Phase.WHOLE, Choice.FORCED)


def test_grammars_made_twice_give_equal_tags_and_share_no_state_before_the_end() -> None:
    text = b'[{"name": "weather.now", "arguments": {"city": "R", "days": -12}}]'
    first, second = (Tracker(tag_grammar(FUNCTIONS, "json_list")) for _ in range(2))
    for byte in text[:-1]:
        assert first.accept(bytes([byte])) == second.accept(bytes([byte]))
        assert first.state is not second.state
        assert first.legal == second.legal
    assert first.accept(text[-1:]) == second.accept(text[-1:])


def test_enumerations_are_written_as_the_layout_writes_them() -> None:
    enum = ["é", 'a"b', "c\\d", "e/f", "\n", "", 12, 1]
    function = document("f", ["x"], x={"type": "string", "enum": enum})
    for value in enum:
        tracker = Tracker(tag_grammar([function], "json_list"))
        text = json.dumps({"name": "f", "arguments": {"x": value}}, ensure_ascii=False)
        tracker.accept(f"[{text}]".encode())
        assert tracker.can_end


def test_no_functions_and_an_unknown_form_are_told() -> None:
    with pytest.raises(ValueError, match="at least one function"):
        CallGrammar({}, CallLayout())
    with pytest.raises(PaskError, match="unknown answer form 'yaml'"):
        tag_grammar(FUNCTIONS, "yaml")


def test_a_value_listed_twice_is_one_and_every_type_has_its_class() -> None:
    function = document("f", ["x"], x={"type": "string", "enum": ["ok", "ok", "no"]})
    assert tags(['[{"name": "f", "arguments": {"x": "', "o", 'k"'], [function])[1:] == [
        "'o': (string, enum, inside/free, near)",
        "'k\"': (string, enum, closing/forced, near)",
    ]
    schema = {"type": "object", "properties": {"x": {"enum": [True, "1", 1, None]}}}
    grammar = CallGrammar({"f": schema}, CallLayout())
    for text, token_class in (
        ("true", TokenClass.BOOLEAN),
        ('"1"', TokenClass.STRING),
        ("1", TokenClass.NUMBER),
        ("null", TokenClass.NULL),
    ):
        tracker = Tracker(grammar)
        tracker.accept(b'{"name": "f", "arguments": {"x": ')
        assert tracker.accept(text.encode())[:2] == (token_class, Role.ENUM)


def test_of_equal_units_in_a_token_the_last_decides_whether_the_choice_is_shared() -> None:
    inner = {"type": "dict", "properties": {"k1": {"type": "any"}, "k2": {"type": "any"}}}
    inner["required"] = ["k2"]
    outer = {"type": "dict", "properties": {"a": inner}, "required": ["a"]}
    function = document("f", ["x"], x=outer)
    assert tags(['[{"name": "f", "arguments": {"x": {', '"a": {"k'], [function])[1:] == [
        '\'"a": {"k\': (key, nested, whole/shared, critical)'
    ]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "object"}, "an object needs properties"),
        ({"type": "object", "properties": {}, "required": ["z"]}, "'z' is required and not"),
        ({"enum": []}, "an enumeration without values"),
        ({"type": "array", "items": {"type": "date"}}, "items: no grammar .* 'date'"),
    ],
)
def test_schemas_without_a_grammar_are_refused_when_the_grammar_is_made(
    schema: dict[str, Any], told: str
) -> None:
    arguments = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(ValueError, match=rf"^function 'f', 'x'.*{told}"):
        CallGrammar({"f": arguments}, CallLayout())
    with pytest.raises(ValueError, match="arguments are an object of declared keys"):
        CallGrammar({"f": {"type": "object", "additionalProperties": True}}, CallLayout())


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(PaskError, match=r"two functions share the name 'weather\.now'"):
        tag_grammar([WEATHER, WEATHER], "json_list")
