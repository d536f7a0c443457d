"""Grammars in EBNF: tags written by hand, and the texts that recursive rules hold."""

from __future__ import annotations

import pytest

from pask.errors import PaskError
from pask.structure.automaton import Unit
from pask.structure.ebnf import EbnfGrammar
from pask.structure.tags import Role, TokenClass
from pask.structure.tracker import IllegalBytes, Tracker

SQL = r"""
root ::= select columns from table (where condition (and condition)*)? ";"
select ::= "SELECT "
columns ::= column (", " column)*
from ::= " FROM "
where ::= " WHERE "
and ::= " AND "
condition ::= column operator value
operator ::= " = " | " < " | " LIKE "
table ::= "users" | "user_logs" | "orders"
column ::= "id" | "item" | "name"
value ::= number | "'" [^'\n]* "'"
number ::= "0" | [1-9] [0-9]{0,8}
"""
KEYWORD = (TokenClass.BOUNDARY, Role.CALL_BOUNDARY)
SQL_ROLES = {
    "select": KEYWORD,
    "from": KEYWORD,
    "where": KEYWORD,
    "and": (TokenClass.BOUNDARY, Role.ARGUMENT_BOUNDARY),
    "operator": (TokenClass.STRING, Role.ENUM),
    "table": (TokenClass.FUNCTION_NAME, Role.FUNCTION_SELECTOR),
    "column": (TokenClass.KEY, Role.REQUIRED_KEY),
    "value": (TokenClass.STRING, Role.REQUIRED_VALUE),
}
VALUE = (TokenClass.STRING, Role.REQUIRED_VALUE)
NUMBER = (TokenClass.NUMBER, Role.REQUIRED_VALUE)

SUM = """
root ::= sum
sum ::= product (("+" | "-") product)*
product ::= atom (("*" | "/") atom)*
atom ::= number | "(" sum ")"
number ::= "0" | [1-9] [0-9]*
"""


def tracker(text, roles=None):
    return Tracker(EbnfGrammar(text, roles or {}))


def taken(text, answer, roles=None):
    """A tracker that has taken the answer byte by byte."""
    walk = tracker(text, roles)
    for byte in answer.encode():
        walk.accept(bytes([byte]))
    return walk


def taken_on(state, answer):
    """The state after the answer, from a state on; None where it is not legal. No tags are made."""
    for byte in answer.encode():
        if byte not in state.edges:
            return None
        state = state.edges[byte].target
    return state


def holds(text, answer):
    """Whether the answer is a whole text of the grammar."""
    state = taken_on(EbnfGrammar(text, {}).start, answer)
    return state is not None and state.final


def phases(text, answer, roles):
    """One letter a byte: o(pening), c(losing), w(hole), i(nside); capitals for layout."""
    walk = tracker(text, roles)
    letters = ""
    for byte in answer.encode():
        tag = walk.accept(bytes([byte]))
        letters += tag.phase[0].upper() if tag.role is Role.LAYOUT else tag.phase[0]
    return letters


QUERY = [
    ("SELECT", "boundary call_boundary opening forced near"),
    (" ", "boundary call_boundary closing forced critical"),
    ("i", "key required_key opening free critical"),
    ("tem", "key required_key closing free critical"),  # `id` was possible before the t
    (" FROM", "boundary call_boundary opening free near"),  # or a comma
    (" ", "boundary call_boundary closing forced critical"),
    ("u", "function_name function_selector opening free near"),
    ("s", "function_name function_selector inside shared near"),
    ("er", "function_name function_selector inside shared critical"),
    ("s", "function_name function_selector closing free critical"),  # or user_logs
    (" WHERE ", "boundary call_boundary whole free critical"),
    ("id", "key required_key whole free near"),
    (" = ", "string enum whole free critical"),
    ("'o", "string required_value opening free critical"),
    ("'", "string required_value closing free critical"),
    (" AND na", "key required_key opening free near"),
    ("me", "key required_key closing forced near"),
    (" <", "string enum opening free near"),
    (" 1", "string enum closing free critical"),  # an operator goes before a value
    ("2", "string required_value inside free critical"),  # more digits could follow
    (";", "scaffold layout inside free end"),
]


def test_a_query_gets_the_tags_that_one_writes_by_hand():
    walk = tracker(SQL, SQL_ROLES)
    for token, words in QUERY:
        assert " ".join(walk.accept(token.encode())) == words, token
    assert walk.can_end
    assert not walk.legal


def test_a_name_says_which_rules_lead_to_it():
    walk = tracker(SQL, SQL_ROLES)
    assert {unit.path for unit in walk.places} == {("select",)}
    walk.accept(b"SELECT id")
    assert walk.places == (Unit(*KEYWORD, ("from",)), Unit(TokenClass.SCAFFOLD, Role.LAYOUT))
    nested = tracker('root ::= call\ncall ::= "f(" value ")"\nvalue ::= [0-9]+ | call', CALLS)
    nested.accept(b"f(f(")
    assert {unit.path for unit in nested.places} == {("call",), ("call", "value")}


CALLS = {"call": (TokenClass.BOUNDARY, Role.ARGUMENT_BOUNDARY), "value": NUMBER}


def test_a_tracker_goes_back_and_forks_like_one_that_never_went_on():
    walk = taken(SQL, "SELECT id", SQL_ROLES)
    before, other = walk.state, walk.fork()
    walk.accept(b" FROM u")
    other.accept(b", name")
    walk.rollback()
    assert walk.state is before
    assert walk.accept(b", name") == taken(SQL, "SELECT id", SQL_ROLES).accept(b", name")
    assert walk.state is other.state
    with pytest.raises(IllegalBytes, match="byte 1 of b' WHERE'"):
        walk.accept(b" WHERE")


def test_parentheses_nest_as_deep_as_one_likes():
    deep = "(" * 2000 + "7" + ")" * 2000
    walk = taken(SUM, deep, {"number": NUMBER})
    assert walk.can_end
    assert walk.legal == frozenset(b"*/+-")
    assert not holds(SUM, deep[:-1])
    assert not holds(SUM, deep + ")")


def test_left_and_right_recursion_hold_the_same_texts():
    left = 'root ::= root "," item | item\nitem ::= "a" | "(" root ")"'
    right = 'root ::= item "," root | item\nitem ::= "a" | "(" root ")"'
    for text in (left, right):
        for answer in ("a", "a,a,a", "(a,(a)),a"):
            assert holds(text, answer), answer
        for answer in ("(a,(a),a", "a,", ",a", "", "a)"):
            assert not holds(text, answer), answer


def test_a_loop_that_comes_back_to_its_place_comes_back_to_its_state():
    for text in ('root ::= "a" "x" root | "b"', 'root ::= ("a" ("x" | "y" "z"?))* "b"'):
        once = taken_on(EbnfGrammar(text, {}).start, "ax")
        assert taken_on(once, "ax") is once
        assert taken_on(once, "axax") is once


def test_alternatives_that_begin_alike_do_not_multiply():
    text = 'root ::= "(" root ")" | "(" root "]" | "(" root "}" | "a"'
    assert holds(text, "(" * 300 + "a" + ")]}" * 100)


@pytest.mark.parametrize(
    "text",
    [
        'root ::= ("a"?)* ("" | "b")',
        'root ::= (("a" | "")* ())* "b"{0,1}',
        'root ::= a* b\na ::= "a" | ""\nb ::= "b" | a',
        'root ::= a "b"? \na ::= a a | "a" | ""',
    ],
)
def test_repeating_what_may_be_empty_ends(text):
    for answer in ("", "a", "aaa", "b", "aab"):
        assert holds(text, answer), answer
    for answer in ("ba", "bb", "c"):
        assert not holds(text, answer), answer


def test_another_rule_can_be_the_root():
    walk = Tracker(EbnfGrammar(SUM, {}, root="number"))
    assert walk.legal == frozenset(b"0123456789")


# Two readings of one text: what the tag says then.
KEY, SELECTOR = SQL_ROLES["column"], SQL_ROLES["table"]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        # A unit that may go on does not close; one that is full does.
        ("root ::= v\nv ::= [0-9]{1,3}", "123", "oic"),
        ("root ::= v\nv ::= [0-9]+", "123", "oii"),
        ('root ::= v ";"\nv ::= "a" "b"?', "a;", "oI"),
        ('root ::= v ";"\nv ::= "a" "b"?', "ab;", "ocI"),
        # A rule without a role is part of the unit, at its end as well.
        ('root ::= v ";"\nv ::= "<" w\nw ::= "a" x\nx ::= ">"?', "<a>;", "oicI"),
        ('root ::= v ";"\nv ::= w "b"*\nw ::= "a"', "ab;", "oiI"),
        # The unit ends with its rule, though the same text could go on around it.
        ('root ::= u "a"\nu ::= v\nv ::= "a"', "aa", "wI"),
        ("root ::= u*\nu ::= v\nv ::= [a-z]", "abc", "www"),
        # Every use is a unit of its own, right recursion included.
        ('root ::= v\nv ::= "a" | "a" v', "aa", "oo"),
        # Going on or a new one: neither is sure.
        ('root ::= v v\nv ::= "a"+', "aaa", "oii"),
        # Nothing of an empty unit shows.
        ('root ::= v "b"\nv ::= "a"? u\nu ::= ""', "ab", "wI"),
        # Layout has no opening and no closing.
        ('root ::= "ab"', "ab", "II"),
    ],
)
def test_a_unit_opens_and_closes_where_that_is_sure(text, answer, expected):
    roles = {name: VALUE for name in "uv" if f"{name} ::=" in text}
    assert phases(text, answer, roles) == expected


def test_the_most_consequential_reading_gives_the_tag():
    text = 'root ::= "go " (name | key) "!"\nname ::= "list"\nkey ::= "li" | "left"'
    walk = taken(text, "go ", {"name": SELECTOR, "key": KEY})
    assert str(walk.accept(b"l")).startswith("(function_name, function_selector, opening/shared")
    assert str(walk.accept(b"i")).startswith("(function_name, function_selector, inside/free")
    assert [unit.path for unit in walk.places] == [("name",), ()]
    assert str(walk.accept(b"!")).startswith("(scaffold, layout, inside/free")


def test_an_ending_is_told_of_the_most_consequential_reading_alone():
    text = "root ::= long | short\nlong ::= [a-z]{1,2}\nshort ::= [a-z]{1,3}"
    assert phases(text, "abc", {"long": SELECTOR, "short": KEY}) == "occ"


def test_one_alternative_in_two_places_is_no_shared_one():
    text = 'root ::= table | table " x"\ntable ::= "users"'
    assert "/forced" in str(tracker(text, {"table": SELECTOR}).accept(b"use"))
    walk = taken(SQL, "SELECT id FROM u", SQL_ROLES)
    assert "/shared" in str(walk.accept(b"s"))


def test_roles_must_be_of_rules_and_pairs_that_there_are():
    with pytest.raises(PaskError, match="given to 'colum', which is no rule; did you mean 'col"):
        EbnfGrammar(SQL, {"colum": KEY})
    with pytest.raises(PaskError, match=r"role of 'column': .* key, enum; choose one of string en"):
        EbnfGrammar(SQL, {"column": (TokenClass.KEY, Role.ENUM)})


def test_the_empty_text_any_number_of_times_is_empty() -> None:
    tracker = Tracker(EbnfGrammar('root ::= ""{999999999} "a" (""){5,900000000}', {}))
    tracker.accept(b"a")
    assert tracker.can_end
    assert not tracker.legal
