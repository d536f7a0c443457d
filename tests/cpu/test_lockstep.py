"""xgrammar's grammar and the tag grammar hold the same texts, byte by byte, on every BFCL row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

import pytest
import xgrammar as xgr

from pask.bfcl.answers import ANSWER_FORMS, render
from pask.bfcl.data import Row, load_rows
from pask.bfcl.grammar import GrammarCompiler
from pask.bfcl.tag_grammar import tag_grammar
from pask.structure.automaton import TagGrammar
from pask.structure.byte_vocabulary import byte_vocabulary
from pask.structure.tracker import IllegalBytes, Tracker
from tests.cpu.gold_texts import gold_calls, other_serialisations

EVERY = 8  # of the rows, without `-m slow`
BYTES = [bytes([byte]) for byte in range(256)]


@cache
def compiler(form: str) -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), form)


def same_fate(compiled: xgr.CompiledGrammar, grammar: TagGrammar, text: bytes) -> bool:
    """Feed both byte by byte, up to the first refusal, which must be the same; whether there was
    none and the text is a whole answer. At every byte both must say the same of the end."""
    matcher, tracker = xgr.GrammarMatcher(compiled), Tracker(grammar)
    for at, byte in enumerate(text):
        assert matcher.is_completed() == tracker.can_end, (at, text)
        try:
            tracker.accept(BYTES[byte])
        except IllegalBytes:
            assert not matcher.accept_string(BYTES[byte]), (at, text)
            return False
        assert matcher.accept_string(BYTES[byte]), (at, text)
    assert matcher.is_completed() == tracker.can_end, text
    return tracker.can_end


def compare(rows: Iterable[Row], form: str) -> tuple[Counter[str], Counter[str]]:
    """How many texts of each kind both hold, and how many both refuse."""
    held: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for row in rows:
        compiled = compiler(form).compile_unchecked(row.functions)
        grammar = tag_grammar(row.functions, form)
        texts = []
        for calls in gold_calls(row):
            texts.append(("gold", render(calls, form, row.functions)))
            if len(texts) == 1:
                texts += other_serialisations(calls, form, row.functions)
        for kind, text in texts:
            fate = same_fate(compiled, grammar, text.encode())
            (held if fate else refused)[kind] += 1
    return held, refused


def check_counts(held: Counter[str], refused: Counter[str], rows: int) -> None:
    """The comparison was one: of what must be held and what must be refused there was plenty."""
    assert held["gold"] > 1.5 * rows
    assert held["escaped letters"] > 0.8 * rows
    for kind in ("escapes", "raw characters", "numbers"):
        assert held[kind] > rows, kind
    for kind in ("numbers", "no escapes", "control characters", "key order", "no blank"):
        assert refused[kind] > rows / 2, kind
    assert not held["no escapes"] + held["control characters"]
    # The fixed layout has no room for one more blank, except in strings.
    blanks = [kind for kind in refused if kind.startswith("blank")]
    assert len(blanks) > 15
    assert not any(held[kind] for kind in blanks)


@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_gold_answers_in_many_spellings_meet_the_same_fate(form: str) -> None:
    rows = list(load_rows().values())[::EVERY]
    check_counts(*compare(rows, form), len(rows))


@pytest.mark.slow
@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_every_rows_gold_answers_in_many_spellings_meet_the_same_fate(form: str) -> None:
    rows = list(load_rows().values())
    assert len(rows) == 2351
    held, refused = compare(rows, form)
    print(form, "held", sum(held.values()), "refused", sum(refused.values()))
    check_counts(held, refused, len(rows))


FUNCTIONS = [
    {
        "name": "f",
        "parameters": {
            "type": "dict",
            "properties": {
                "n": {"type": "integer"},
                "s": {"type": "string"},
                "e": {"type": "string", "enum": ["km", "miles"]},
                "a": {"type": "any"},
            },
            "required": ["n"],
        },
    }
]
HEAD = '[{"name": "f", "arguments": {"n": '

MALFORMED = [
    ("", b"{"),  # no list
    ("", b" ["),
    ("[", b"]"),  # no call
    ("[", b'{"name": "g"'),  # unknown function
    ("[", b'{"arguments"'),
    (HEAD, b'"1"'),  # wrong type
    (HEAD, b"01"),
    (HEAD, b"-0"),
    (HEAD, b"1.5"),
    (HEAD + "1", b', "n"'),  # twice
    (HEAD + "1", b', "zzz"'),  # unknown key
    (HEAD + '1, "e": ', b'"kmh"'),  # not in the enumeration
    (HEAD + '1, "s": "', b"\n"),  # a control character in a string
    (HEAD + '1, "s": "', b"\xff"),  # not UTF-8
    (HEAD + '1, "s": "', b"\xc3\x28"),
    (HEAD + '1, "s": "', b"\xc0\xaf"),  # an overlong solidus
    (HEAD + '1, "s": "', b"\\x41"),  # no escape of JSON's
    (HEAD + '1, "s": "', b"\\u12g4"),
    (HEAD + '1, "a": ', b"nul }"),
    (HEAD + '1, "a": ', b"[1,2]"),  # no blank
    (HEAD + '1, "a": ', b"{1: 2}"),  # a key that is no string
    (HEAD + "1}}]", b"\n"),  # text after the end
]


@pytest.mark.parametrize(("before", "token"), MALFORMED)
def test_illegal_bytes_are_refused_by_both_and_change_nothing(before: str, token: bytes) -> None:
    grammar = tag_grammar(FUNCTIONS, "json_list")
    matcher = xgr.GrammarMatcher(compiler("json_list").compile_unchecked(FUNCTIONS))
    assert matcher.accept_string(before) or not before
    assert not matcher.accept_string(token)
    tracker = Tracker(grammar)
    if before:
        tracker.accept(before.encode())
    here = tracker.state, tracker.legal, tracker.can_end
    with pytest.raises(IllegalBytes, match="not legal here; legal: "):
        tracker.accept(token)
    assert (tracker.state, tracker.legal, tracker.can_end) == here
    tracker.rollback(int(bool(before)))
    assert tracker.state is grammar.start


def test_a_token_without_bytes_is_no_token() -> None:
    tracker = Tracker(tag_grammar(FUNCTIONS, "json_list"))
    with pytest.raises(ValueError, match="without bytes"):
        tracker.accept(b"")
    assert tracker.legal == {ord("[")}
