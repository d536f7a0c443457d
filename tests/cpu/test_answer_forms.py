"""Properties of the two answer forms' grammars, by real xgrammar: they hold the same calls, and
these are the JSON Schema's."""

from __future__ import annotations

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from pask.bfcl.answers import ANSWER_FORMS, parse, render
from pask.bfcl.grammar import accepts
from pask.bfcl.schema import calls_schema

FUNCTION = {
    "name": "pkg.f",
    "parameters": {
        "type": "dict",
        "properties": {
            "año": {"type": "integer"},
            "mode": {"type": "boolean", "enum": ["N/A", 'say "é"', 3]},
            "points": {"type": "tuple", "items": {"type": "float"}},
            "inner": {
                "type": "dict",
                "properties": {"x": {"type": "any"}, "s": {"type": "string"}},
                "required": ["s"],
            },
            "free": {"type": "dict"},
        },
        "required": ["mode"],
    },
}
NOTHING = {"name": "g", "parameters": {"type": "dict", "properties": {}, "required": []}}
FUNCTIONS = [FUNCTION, NOTHING]

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer())
    | texts
    | st.sampled_from(["</tool_call>", "\n</tool_call>\n<tool_call>\n", '"}]']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
legal = st.fixed_dictionaries(
    {"mode": st.sampled_from(["N/A", 'say "é"', 3])},
    optional={
        "año": st.integers(),
        "points": st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers()),
        "inner": st.fixed_dictionaries({"s": texts}, optional={"x": anything}),
        "free": st.dictionaries(texts, anything, max_size=2),
    },
)
spoilt = st.dictionaries(
    st.sampled_from(["año", "mode", "points", "inner", "free", "new"]), anything, max_size=3
)
calls = st.fixed_dictionaries({"pkg.f": legal}) | st.just({"g": {}})
maybe_calls = (
    calls
    | st.fixed_dictionaries({"pkg.f": spoilt})
    | st.fixed_dictionaries({"g": spoilt})
    | st.just({"h": {}})
)


@given(st.lists(calls, min_size=1, max_size=3))
def test_legal_calls_are_accepted_by_both_forms(given_calls):
    for form in ANSWER_FORMS:
        text = render(given_calls, form, FUNCTIONS)
        assert accepts(FUNCTIONS, text, form), text
        assert parse(text, form) == given_calls


@settings(max_examples=300)
@given(st.lists(maybe_calls, min_size=1, max_size=3))
def test_both_forms_hold_the_same_calls_and_these_are_the_schemas(given_calls):
    """Whole floats are left out: JSON Schema takes 1.0 for an integer, the grammar does not."""
    verdicts = [
        accepts(FUNCTIONS, render(given_calls, form, FUNCTIONS), form) for form in ANSWER_FORMS
    ]
    items = [{"name": n, "arguments": a} for call in given_calls for n, a in call.items()]
    valid = jsonschema.Draft202012Validator(calls_schema(FUNCTIONS)).is_valid(items)
    assert verdicts == [valid, valid]
