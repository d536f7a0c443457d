"""The notation of EBNF grammars: what it says, character by character, and its errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.errors import PaskError
from pask.structure.ebnf import EbnfGrammar
from pask.structure.ebnf_characters import byte_chains

NOTED = r"""  # comments and line breaks anywhere
root ::= "a"   # one
    | ( "b"    # two
      "c" )+ d.e-f_1
d.e-f_1 ::= "\x41\u00e9\"\\\t" (=("x" [y])) # an assertion
"""


def holds(text, answer):
    """Whether the answer is a whole text of the grammar."""
    state = EbnfGrammar(text, {}).start
    for byte in answer.encode():
        if byte not in state.edges:
            return False
        state = state.edges[byte].target
    return state.final


def test_bounds_of_repetitions_are_kept():
    text = 'root ::= "a"{2} "b"{1,3} "c"{0, -1} "d"{1,} "e"{0,0} "f" {0,1}'
    for answer in ("aabd", "aabbbcccdddf"):
        assert holds(text, answer), answer
    for answer in ("abd", "aaabd", "aad", "aabbbbd", "aab", "aabded", "aabdff"):
        assert not holds(text, answer), answer


def test_comments_escapes_and_assertions_are_read():
    assert holds(NOTED, "a")
    assert holds(NOTED, 'bcbcAé"\\\t')
    assert not holds(NOTED, 'Aé"\\\t')


@pytest.mark.parametrize(
    ("notation", "inside", "outside"),
    [
        ("[a-c]", "abc", "d`A"),
        ("[^a-c]", "dé中😀\0", "abc"),
        ("[é-ü]", "éöü", "èýC"),
        ("[中-\\U0001F600]", "中豈😀", "丬😁é"),
        ("[^\\0-\\x7f]", "\x80߿ࠀ￿𐀀\U0010ffff", "a\x7f"),
        ("[+-]", "+-", ","),
        ("[-^]", "-^", "]"),
        ("[\\]\\-\\\\]", "]-\\", "["),
        ("[^]", "a]é", ""),
    ],
)
def test_a_class_is_of_characters_not_of_bytes(notation, inside, outside):
    text = f'root ::= {notation} "!"'
    for character in inside:
        assert holds(text, character + "!"), character
    for character in outside:
        assert not holds(text, character + "!"), character


code_points = st.integers(0, 0x10FFFF) | st.sampled_from(
    [0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x3FFFF, 0x40000]
)


@given(code_points, code_points, code_points)
def test_byte_chains_hold_a_character_once_if_it_is_in_the_range(one, other, character):
    first, last = sorted((one, other))
    data = chr(character).encode("utf-8", "surrogatepass")
    holding = [
        chain
        for chain in byte_chains(first, last)
        if len(chain) == len(data)
        and all(low <= byte <= high for byte, (low, high) in zip(data, chain, strict=True))
    ]
    assert len(holding) == (first <= character <= last)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root ::= "a', "line 1, column 10: '\"' without its end on the same line"),
        ("root ::= [a\nb]", "line 1, column 10: '\\['.*same line"),
        ('\nroot ::= "a" ]', "line 2, column 14: ']' is not expected here"),
        ("root ::= ", "the end of the text is not expected here; write a rule's name or"),
        ('root ::= ("a"', "the end of the text is not expected"),
        ('root ::= | "a"', "line 1, column 10: '|' is not expected here; write"),
        ("root ::= 'a'", 'line 1, column 10: "\'" is not expected here'),
        ('root ::= "a"{,2}', "column 13"),
        ('root ::= "a"**', "column 14"),
        ('root ::= TagDispatch(("a", b))', "',' is not expected here"),
        ('root ::= "a" b ::= "c"', "line 1, column 14: rule 'b' must begin a line"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: rule 'root' is defined twice; join"),
        ('root ::= "a" nane\nname ::= "b"', "column 14: there is no rule 'nane'; did you mean 'n"),
        ('true ::= "a"', "line 1, column 1: 'true' cannot name a rule"),
        ('root ::= "a"{3,2}', r"column 13: \{3,2\}: at most 2 is less than at least 3"),
        ("root ::= []", "no character is in the class \\[\\]"),
        (r"root ::= [^\0-\U0010ffff]", "no character is in the class"),
        ("root ::= [z-a]", "the range z-a is upside down"),
        ("root ::= [a-c-e]", "the - in \\[a-c-e\\] could be a range or itself"),
        ("root ::= [--a]", "could be a range or itself"),
        (r"root ::= [\d]", r"there is no escape \\d"),
        (r'root ::= "\q"', r"there is no escape \\q; write"),
        (r'root ::= "\u12"', r"there is no escape \\u"),
        (r'root ::= "\xe9a"', r"\\xe9a needs exactly two digits"),
        (r'root ::= "\U00110000"', "is no code point"),
        ('root ::= "a" root', "rule 'root' matches no finite text"),
        ('root ::= "a"\nx ::= y\ny ::= x', "rule 'x' matches no finite text"),
        ('name ::= "a"', "there is no root rule 'root'; known: name"),
        ("", "there is no root rule 'root'; known: none"),
        ('root ::= "a"{12345678901}', "a count of more than 9 digits"),
        ('root ::= "a"{1000000}', "rule 'root': the grammar has more than 50000 places"),
        ("root ::= " + '("b" ' * 900 + '"a"' + ")" * 900, "groups are nested too deeply"),
    ],
)
def test_a_faulty_grammar_ends_in_one_line_that_says_where(text, message):
    with pytest.raises(PaskError, match=message) as caught:
        EbnfGrammar(text, {})
    assert str(caught.value).startswith("EBNF grammar")
    assert "\n" not in str(caught.value)
