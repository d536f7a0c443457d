"""Calls <-> text: the fixed layout, the round trip, and what is refused as malformed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.bfcl.answers import ANSWER_FORMS, MalformedAnswer, parse, render
from pask.errors import PaskError

CALLS = [{"pkg.f": {"a": 1, "b": ["x", None]}}, {"g": {}}]
LIST = (
    '[{"name": "pkg.f", "arguments": {"a": 1, "b": ["x", null]}}, {"name": "g", "arguments": {}}]'
)
BLOCKS = (
    '<tool_call>\n{"name": "pkg.f", "arguments": {"a": 1, "b": ["x", null]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
call_lists = st.lists(
    st.dictionaries(texts, st.dictionaries(texts, values, max_size=3), min_size=1, max_size=1),
    min_size=1,
    max_size=3,
)


def test_layout():
    assert render(CALLS, "json_list") == LIST
    assert render(CALLS, "tool_call") == BLOCKS
    assert parse(LIST, "json_list") == CALLS
    assert parse(BLOCKS, "tool_call") == CALLS


def test_text_is_written_as_it_is():
    assert render([{"f": {"año": "日本 </tool_call>\n\"'"}}], "json_list") == (
        '[{"name": "f", "arguments": {"año": "日本 </tool_call>\\n\\"\'"}}]'
    )


@pytest.mark.parametrize("form", ANSWER_FORMS)
@given(calls=call_lists)
def test_round_trip(form, calls):
    back = parse(render(calls, form), form)
    assert back == calls
    assert repr(back) == repr(calls)  # types (1, 1.0, True) and key order too


def test_keys_follow_the_documents_nested_ones_too():
    inner = {"type": "dict", "properties": {"y": {"type": "any"}, "x": {"type": "any"}}}
    function = {
        "name": "f",
        "parameters": {
            "type": "dict",
            "properties": {
                "second": {"type": "array", "items": inner},
                "first": {"type": "string"},
                "third": inner,
            },
        },
    }
    call = {"f": {"new": 0, "third": {"x": 1, "y": 2}, "first": "a", "second": [{"x": 3, "y": 4}]}}
    assert render([call], "json_list", [function]) == (
        '[{"name": "f", "arguments": {"second": [{"y": 4, "x": 3}], "first": "a", '
        '"third": {"y": 2, "x": 1}, "new": 0}}]'
    )
    assert render([{"unknown": {"b": 1, "a": 2}}], "json_list", [function]) == (
        '[{"name": "unknown", "arguments": {"b": 1, "a": 2}}]'
    )


@pytest.mark.parametrize(
    "calls", [[], [{}], [{"f": {}, "g": {}}], [{"f": {"a": float("nan")}}], [{"f": {"a": {1, 2}}}]]
)
def test_what_cannot_be_rendered(calls):
    with pytest.raises((ValueError, TypeError)):
        render(calls, "json_list")


INNER = [
    "",
    "{}",
    "null",
    '"f"',
    '{"name": "f"}',
    '{"name": "f", "arguments": []}',
    '{"name": 1, "arguments": {}}',
    '{"name": "f", "arguments": {}, "id": 1}',
    '{"name": "f", "name": "f", "arguments": {}}',
    '{"name": "f", "arguments": {"a": 1, "a": 1}}',
    '{"name": "f", "arguments": {"a": {"b": 1, "b": 2}}}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": -Infinity}}',
    '{"name": "f", "arguments": {"a": 1e999}}',
    '{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}",
    '{"name": "f", "arguments": {"a": "\\ud800"}}',
    '{"name": "f", "arguments": {"a": ' + "[" * 100_000,
    '{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    '{"name": "f", "arguments": {"a": "x',
    '{"name": "f", "arguments": {}} {"name": "f", "arguments": {}}',
]


@pytest.mark.parametrize("inner", INNER, ids=range(len(INNER)))
def test_malformed_calls(inner):
    for text, form in (
        (f"[{inner}]", "json_list"),
        (f"<tool_call>\n{inner}\n</tool_call>", "tool_call"),
    ):
        with pytest.raises(MalformedAnswer):
            parse(text, form)


@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_every_cut_of_an_answer_is_malformed_or_whole_calls(form):
    """Cut off at the output limit: a list never passes; blocks pass only between two of them."""
    whole = render(CALLS, form)
    for end in range(len(whole)):
        try:
            calls = parse(whole[:end], form)
        except MalformedAnswer:
            continue
        assert form == "tool_call"
        assert calls == CALLS[:1]
        assert whole[end:].startswith("\n<tool_call>")


@pytest.mark.parametrize(
    "text", [BLOCKS + "\n", BLOCKS + "\ntext", "text\n" + BLOCKS, LIST, BLOCKS.replace("\n", "")]
)
def test_text_around_blocks_is_malformed(text):
    with pytest.raises(MalformedAnswer):
        parse(text, "tool_call")


def test_malformed_is_the_models_fault_and_a_wrong_form_the_users():
    assert not issubclass(MalformedAnswer, PaskError)
    with pytest.raises(PaskError, match="json_list, tool_call"):
        parse(LIST, "json")
    with pytest.raises(PaskError, match="json_list, tool_call"):
        render(CALLS, "xml")
