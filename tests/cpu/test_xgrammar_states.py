"""Tags from xgrammar's own parser states, against those of the tracker."""

from __future__ import annotations

import importlib.metadata
import random
from collections import Counter
from itertools import pairwise

import pytest
import xgrammar as xgr

from pask.bfcl.answers import ANSWER_FORMS, render
from pask.bfcl.data import CATEGORIES, load_rows
from pask.bfcl.schema import arguments_schema
from pask.bfcl.tag_grammar import LAYOUTS, tag_grammar
from pask.structure.byte_vocabulary import byte_vocabulary
from pask.structure.call_layout import CallLayout
from pask.structure.calls import CallGrammar
from pask.structure.tags import Choice, Next, Phase, Role, Tag, TokenClass
from pask.structure.tracker import IllegalBytes, Tracker
from pask.structure.xgrammar_states import XgrammarTracker
from tests.cpu.gold_texts import gold_calls
from tests.cpu.tokenizers_real import real_tokenizer

ROWS = 6  # of each category
ANSWERS = 2  # of each row, in each form


def pieces(text: bytes, how: str) -> list[bytes]:
    """The text as tokens: of a real tokenizer, single bytes, or of random lengths."""
    if how == "bytes":
        return [bytes([byte]) for byte in text]
    if how != "random":
        return real_tokenizer(how).cut(text.decode())
    draw, cuts = random.Random(len(text)), [0]
    while cuts[-1] < len(text):
        cuts.append(cuts[-1] + draw.randint(1, 9))
    return [text[a:b] for a, b in pairwise(cuts)]


def same_tags(tracker: Tracker, second: XgrammarTracker, tokens: list[bytes]) -> list[Tag]:
    """Give both the tokens, up to one that both refuse; the tags, which must be the same."""
    tags = []
    for at, token in enumerate(tokens):
        assert (tracker.legal, tracker.can_end) == (second.legal, second.can_end), tokens[:at]
        try:
            tag = tracker.accept(token)
        except IllegalBytes:
            with pytest.raises(ValueError, match="not legal here"):
                second.accept(token)
            assert (tracker.legal, tracker.can_end) == (second.legal, second.can_end)
            break
        assert second.accept(token) == tag, (tokens[:at], token)
        tags.append(tag)
    return tags


@pytest.mark.parametrize("how", ["smollm2", "qwen", "bytes", "random"])
def test_both_ways_give_gold_answers_the_same_tags(how: str) -> None:
    rows = load_rows().values()
    seen: Counter[Role] = Counter()
    tags = 0
    for category in CATEGORIES:
        group = [row for row in rows if row.category == category]
        for row in group[:: max(1, len(group) // ROWS)]:
            schemas = {f["name"]: arguments_schema(f) for f in row.functions}
            for form in ANSWER_FORMS:
                second = XgrammarTracker(schemas, LAYOUTS[form])
                grammar = tag_grammar(row.functions, form)
                for calls, _ in zip(gold_calls(row), range(ANSWERS), strict=False):
                    text = render(calls, form, row.functions).encode()
                    second.reset()
                    found = same_tags(Tracker(grammar), second, pieces(text, how))
                    seen.update(tag.role for tag in found)
                    tags += len(found)
    assert tags > 3_000
    assert set(seen) == set(Role)


ODD = {
    # Shared beginnings, of functions, of keys with other roles, and of integers where one ends.
    "get": {"properties": {"a": {"enum": [1, 12, 120]}, "ab": {"enum": ["x", "xy", "yx"]},
                           "abc": {"type": "integer"}, "s": {"type": "string"}},
            "required": ["ab", "s"]},
    "get_more": {"properties": {}, "required": []},
    'g"e\\t é\x7f😀\n': {"properties": {
        "o": {"type": "object", "properties": {"k": {"type": "number"}, "kk": {},
              "kind": {"enum": [-1, 10, 100]}}, "required": ["kk"], "additionalProperties": False},
        "l": {"type": "array", "items": {"type": "array", "items": {"enum": [1, 11]}}},
        "f": {"type": "object", "additionalProperties": True}, "b": {"type": "boolean"}, "any": {},
        "é": {"type": "array", "items": {"type": "object", "properties": {}}},
        "deep": {"type": "object", "properties": {"a": {"type": "object", "properties": {
            "k1": {"enum": [None, True, 10, "1", True, "x", "x", "xx"]},
            "k2": {"type": "boolean"}}, "required": ["k2"]}}, "required": ["a"]}}, "required": []},
}  # fmt: skip
FORMS = {
    "list": LAYOUTS["json_list"],
    "blocks": LAYOUTS["tool_call"],
    "lines": CallLayout(separator="\n"),
    "all": CallLayout("<calls>", "call: ", ";", " and then ", ".\n"),
}


@pytest.mark.parametrize("layout", FORMS)
def test_both_ways_agree_on_random_bytes_of_odd_schemas(layout: str) -> None:
    schemas = {name: {"type": "object", **schema} for name, schema in ODD.items()}
    grammar, second = CallGrammar(schemas, FORMS[layout]), XgrammarTracker(schemas, FORMS[layout])
    draw = random.Random(7)
    seen: Counter[Tag] = Counter()
    for _ in range(60):
        probe = Tracker(grammar)
        text = b""
        while probe.legal and len(text) < 250:
            some = sorted(probe.legal & set(b'"]}01:n')) if draw.random() < 0.6 else []
            text += bytes([draw.choice(some or sorted(probe.legal))])
            probe.accept(text[-1:])
        second.reset()
        seen.update(same_tags(Tracker(grammar), second, pieces(text, "bytes")))
        second.reset()
        seen.update(same_tags(Tracker(grammar), second, pieces(text, "random")))
    for value in (*Role, *TokenClass, *Phase, *Choice, *(Next.CRITICAL, Next.NEAR, Next.FAR)):
        assert any(value in tag for tag in seen), value


def test_xgrammar_prints_its_states_as_this_module_reads_them() -> None:
    """The print is private: another version than the pinned one may change it."""
    assert importlib.metadata.version("xgrammar") == "0.2.8"
    compiler = xgr.GrammarCompiler(byte_vocabulary(), max_threads=1)
    compiled = compiler.compile_grammar('root ::= "a" tail\ntail ::= "b" | "c" root\n')
    assert str(compiled.grammar).split("\n")[1].startswith("tail ::= ")
    matcher = xgr.GrammarMatcher(compiled)
    assert matcher.accept_string("a")
    words = (
        "There are 2 steps in history. Last step: [ ParserState(rule_id=1, sequence_id=9, "
        "element_id=4, rule_start_pos=-1, sub_element_id=0), ]"
    )
    assert " ".join(matcher._debug_print_internal_state().split()) == words


def test_a_refused_token_leaves_the_second_way_where_it_was() -> None:
    schemas = {"f": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}
    second = XgrammarTracker(schemas, LAYOUTS["json_list"])
    second.accept(b'[{"name": "f", "arguments": {"n": 1')
    here = second.legal, second.can_end
    for token in (b"2x", b"}}]]", b", ", b"\xff"):
        with pytest.raises(ValueError, match="not legal here"):
            second.accept(token)
        assert (second.legal, second.can_end) == here
    with pytest.raises(ValueError, match="without bytes"):
        second.accept(b"")
    assert second.accept(b"}}]").next is Next.END
    assert second.can_end
    assert not second.legal


def test_the_second_way_refuses_types_that_have_no_grammar() -> None:
    schemas = {"f": {"type": "object", "properties": {"d": {"type": "date"}}}}
    with pytest.raises(ValueError, match="'date'"):
        XgrammarTracker(schemas, LAYOUTS["json_list"])
