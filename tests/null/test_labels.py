"""One label for every token, and the proof that tokens spell their text."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.errors import PaskError
from pask.structure.labels import PROTECTED, Label, token_labels
from pask.structure.token_text import TokenText

ORDER = list(Label)


@st.composite
def labelled_texts(draw):
    """Spans, and tokens that cover them with some gaps and some tokens of no bytes."""
    spans = draw(st.lists(st.tuples(st.sampled_from(Label), st.integers(0, 5)), min_size=1))
    length = sum(size for _, size in spans)
    bounds = sorted(draw(st.lists(st.integers(0, length))))
    places = list(itertools.pairwise(bounds))
    skipped = draw(st.sets(st.sampled_from(places))) if places else set()
    return spans, [place for place in places if place not in skipped]


@given(labelled_texts())
def test_a_token_has_the_first_label_of_its_bytes_in_the_documented_order(drawn):
    spans, tokens = drawn
    by_byte = [label for label, size in spans for _ in range(size)]
    if not by_byte:
        with pytest.raises(ValueError, match="outside the text"):
            token_labels(spans, [(0, 0)])
        return
    padded = [*by_byte, by_byte[-1]]  # a token without bytes at the end
    expected = [
        min(by_byte[start:end] or padded[start : start + 1], key=ORDER.index)
        for start, end in tokens
    ]
    assert list(token_labels(spans, tokens)) == expected


def test_the_users_words_come_before_everything_else_and_are_protected():
    assert ORDER[0] is Label.USER
    assert set(PROTECTED) == {Label.USER}
    whole = [(label, 1) for label in reversed(ORDER)]
    for first in range(len(whole)):
        assert token_labels(whole, [(first, len(whole))]) == (Label.USER,)
    assert token_labels(whole[:-1], [(0, len(whole) - 1)]) == (Label.FUNCTION_NAME,)


@pytest.mark.parametrize("tokens", [[(0, 2), (1, 3)], [(2, 1)], [(0, 4)], [(-1, 2)]])
def test_tokens_out_of_order_or_outside_the_text_are_refused(tokens):
    with pytest.raises(ValueError, match="out of order or outside"):
        token_labels([(Label.USER, 3)], tokens)


@dataclass(frozen=True)
class Added:
    content: str
    lstrip: bool = False
    rstrip: bool = False


CHAT, NAME, USER = Label.CHAT_SCAFFOLD, Label.FUNCTION_NAME, Label.USER


def labels_of(pieces, tokens, added=()):
    """Labels of tokens given as bytes, or as `Added`."""
    vocabulary = [b"" if isinstance(token, Added) else token for token in tokens]
    known = {i: token for i, token in enumerate(tokens) if isinstance(token, Added)}
    return TokenText(vocabulary, known).labels(pieces, range(len(tokens)))


def test_tokens_that_split_a_character_are_each_of_its_piece():
    pieces = [(CHAT, "a"), (NAME, "ñ東"), (CHAT, "b")]
    tokens = [b"a", b"\xc3", b"\xb1\xe6", b"\x9d\xb1b"]
    assert labels_of(pieces, tokens) == (CHAT, NAME, NAME, NAME)


def test_an_added_token_stands_for_its_own_text():
    end = Added("<|end|>")
    assert labels_of([(USER, "Hi"), (CHAT, "<|end|>\n")], [b"Hi", end, b"\n"]) == (USER, CHAT, CHAT)
    # Said by the user it is the user's, as is all that the user says.
    assert labels_of([(USER, "Hi<|end|>"), (CHAT, "\n")], [b"Hi", end, b"\n"]) == (USER, USER, CHAT)


def test_a_blank_put_before_a_stretch_belongs_to_what_it_stands_before():
    mark = Added("<|user|>")
    pieces = [(NAME, "ab"), (CHAT, "<|user|>"), (USER, "Hi")]
    assert labels_of(pieces, [b" ab", mark, b" ", b"Hi"]) == (NAME, CHAT, USER, USER)
    assert labels_of(pieces, [b" ", b"ab", mark, b" Hi"]) == (NAME, NAME, CHAT, USER)
    assert labels_of([(USER, " Hi")], [b" ", b" Hi"]) == (USER, USER)
    # One blank, and only there.
    for tokens in ([b"  ab", mark, b"Hi"], [b"a", b" b", mark, b"Hi"], [b" ab", b" ", mark, b"Hi"]):
        with pytest.raises(PaskError, match="do not spell"):
            labels_of(pieces, tokens)


def test_blanks_that_an_added_token_takes_with_it_decide_no_label():
    both = Added("<|user|>", lstrip=True, rstrip=True)
    pieces = [(NAME, "ab \n"), (CHAT, "<|user|>\n"), (USER, "\u00a0 Hi")]
    assert labels_of(pieces, [b"ab", both, b"Hi"]) == (NAME, CHAT, USER)
    assert labels_of(pieces, [b"ab", both, b" Hi"]) == (NAME, CHAT, USER)
    with pytest.raises(PaskError, match="do not spell"):
        labels_of(pieces, [b"ab", Added("<|user|>"), b"Hi"])


def test_tokens_of_the_composed_text_are_traced_to_the_given_one():
    pieces = [(CHAT, "x"), (USER, "Zu\u0308rich"), (CHAT, "y")]
    assert labels_of(pieces, [b"x", "Zürich".encode(), b"y"]) == (CHAT, USER, CHAT)
    assert labels_of(pieces, [b"x", "Zu\u0308rich".encode(), b"y"]) == (CHAT, USER, CHAT)


def test_a_marked_blank_is_a_blank():
    pieces = [(NAME, "a"), (USER, "  b ▁"), (CHAT, "c")]
    tokens = ["▁a".encode(), "▁▁".encode(), "b▁".encode(), "▁c".encode()]
    assert labels_of(pieces, tokens) == (NAME, USER, USER, USER)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([b"Hi ", b"<unk>", b"!"], "the text goes on with '東!', the tokens with '<unk>!'"),
        ([b"hi ", "東".encode(), b"!"], "the text goes on with 'Hi 東!', the tokens with 'hi 東!'"),
        ([b"Hi", "東".encode(), b"!"], "the text goes on with ' 東!', the tokens with '東!'"),
        ([b"Hi ", "東".encode()], "the text goes on with '!', the tokens with nothing"),
        (["Hi 東!".encode(), b"?"], "the text goes on with nothing, the tokens with '?'"),
        ([b"Hi ", Added("東!!")], "the text goes on with nothing, the tokens with '!'"),
    ],
)
def test_tokens_that_lose_or_change_text_are_refused_in_one_line(tokens, words):
    with pytest.raises(PaskError, match=re.escape(words)) as caught:
        labels_of([(USER, "Hi 東!")], tokens)
    assert "\n" not in str(caught.value)
    assert "byte-level BPE" in str(caught.value)


def test_an_id_outside_the_vocabulary_is_the_programmers_fault():
    with pytest.raises(KeyError):
        TokenText([b"a"], {}).labels([(USER, "ab")], [0, 1])
