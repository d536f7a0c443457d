"""What holds of the tracker for any answer, however it is cut into tokens."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pask.bfcl.answers import ANSWER_FORMS, Call, render
from pask.bfcl.tag_grammar import tag_grammar
from pask.structure.tags import Choice
from pask.structure.tracker import Tracker
from tests.null.documents import document

NAMES = st.text(alphabet='abZ_.é"\\ ', min_size=1, max_size=5)


def values() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers(-99, 10**6) | st.text(max_size=6)
    floats = st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        scalars | floats,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=6,
    )


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Call]]:
    """Functions of free-form arguments, and calls of them in the documents' order of keys."""
    functions = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        keys = draw(st.lists(NAMES, max_size=4, unique=True))
        required = [key for key in keys if draw(st.booleans())]
        functions.append(document(name, required, **{key: {"type": "any"} for key in keys}))
    calls: list[Call] = []
    for function in draw(st.lists(st.sampled_from(functions), min_size=1, max_size=3)):
        parameters = function["parameters"]
        given_keys = [
            key
            for key in parameters["properties"]
            if key in parameters["required"] or draw(st.booleans())
        ]
        calls.append({function["name"]: {key: draw(values()) for key in given_keys}})
    return functions, calls


@settings(deadline=None)
@given(answers(), st.sampled_from(ANSWER_FORMS), st.data())
def test_any_answer_is_accepted_in_any_tokens_and_leads_to_the_same_place(
    answer: tuple[list[dict[str, Any]], list[Call]], form: str, data: st.DataObject
) -> None:
    functions, calls = answer
    text = render(calls, form).encode()
    grammar = tag_grammar(functions, form)
    by_bytes, by_tokens = Tracker(grammar), Tracker(grammar)
    at = 0
    while at < len(text):
        length = data.draw(st.integers(1, 12))
        token = text[at : at + length]
        forked = by_tokens.fork()
        found = by_tokens.accept(token)
        assert forked.accept(token) == found
        singles = [by_bytes.accept(bytes([byte])) for byte in token]
        assert by_bytes.state is by_tokens.state is forked.state
        # A token's parts say what the whole says.
        assert found.role in {single.role for single in singles}
        assert (found.choice is Choice.FREE) == any(s.choice is Choice.FREE for s in singles)
        assert found.next is singles[-1].next
        at += length
    assert by_tokens.can_end


@settings(deadline=None)
@given(answers(), st.sampled_from(ANSWER_FORMS), st.data())
def test_tokens_taken_back_leave_no_trace(
    answer: tuple[list[dict[str, Any]], list[Call]], form: str, data: st.DataObject
) -> None:
    functions, calls = answer
    text = render(calls, form).encode()
    tracker = Tracker(tag_grammar(functions, form))
    cut = data.draw(st.integers(0, len(text)))
    for byte in text[:cut]:
        tracker.accept(bytes([byte]))
    state, legal, places = tracker.state, tracker.legal, tracker.places
    other = tracker.fork()
    first = [tracker.accept(bytes([byte])) for byte in text[cut:]]
    tracker.rollback(len(text) - cut)
    assert (tracker.state, tracker.legal, tracker.places) == (state, legal, places)
    assert [tracker.accept(bytes([byte])) for byte in text[cut:]] == first
    assert [other.accept(bytes([byte])) for byte in text[cut:]] == first
