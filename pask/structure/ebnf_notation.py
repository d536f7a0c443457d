r"""The notation of grammars that are written by hand: text -> rules.

It is xgrammar's own, so one text makes the masks there and the tags here:

    root ::= "SELECT " name ("," name){0,3}   # a comment
    name ::= [a-z_] [a-z0-9_]* | "\"" [^"\\]+ "\""

Literals, classes of characters (a bare `-` first, last or in a range), rules, groups, `|`, and
after any of these `*`, `+`, `?`, `{2}`, `{2,}`, `{2,3}` (-1 for no upper bound, as xgrammar prints
it). A rule's name is the first thing on its line. Escapes: `\n \r \t \" \\ \0 \e ...`, `\xHH`,
`\uHHHH`, `\UHHHHHHHH`, all of them code points; in a class also those of its own marks. An
assertion `(=...)` at a rule's end only makes xgrammar faster and is read over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from pask.errors import PaskError, known_names
from pask.structure.ebnf_characters import class_ranges, literal_bytes


@dataclass(frozen=True, eq=False)
class Literal:
    """These bytes: UTF-8."""

    data: bytes


@dataclass(frozen=True, eq=False)
class CharacterClass:
    """One character of these ranges of code points: sorted, apart, both ends included."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Reference:
    """A use of another rule. `where` in the text it stands."""

    name: str
    where: str


@dataclass(frozen=True, eq=False)
class Concatenation:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Alternation:
    choices: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Repetition:
    """`part`, `low` to `high` times; no upper bound where `high` is None."""

    part: Expression
    low: int
    high: int | None


Expression = Literal | CharacterClass | Reference | Concatenation | Alternation | Repetition

_NOTATION = r"""
start: rule*
rule: RULE "::=" alternation ["(=" alternation ")"]
alternation: concatenation ("|" concatenation)*
concatenation: _repetition+
_repetition: _atom | repetition
repetition: _atom (STAR | PLUS | QUESTION | COUNT)
_atom: literal | character_class | reference | group
literal: STRING
character_class: CLASS
reference: NAME
group: "(" [alternation] ")"

ASSIGN: "::="
AHEAD: "(="
STAR: "*"
PLUS: "+"
QUESTION: "?"
COUNT: /\{[ \t]*\d+[ \t]*(,[ \t]*(-1|\d+)?[ \t]*)?\}/
STRING: /"([^"\\\r\n\x00]|\\.)*"/
CLASS: /\[([^\]\\\r\n\x00]|\\.)*\]/
RULE.1: /[A-Za-z_.-][A-Za-z0-9_.-]*(?=([ \t\r\n]|#[^\r\n]*[\r\n])*::=)/
NAME: /[A-Za-z_.-][A-Za-z0-9_.-]*/
%ignore /[ \t\r\n]+/
%ignore /#[^\r\n]*/
"""

_SPOKEN = {
    "RULE": "a rule",
    "NAME": "a rule's name",
    "STRING": "a literal",
    "CLASS": "a class",
    "LPAR": "(",
    "RPAR": ")",
    "ASSIGN": "::=",
}
_RESERVED = ("true", "false")  # xgrammar reads them as values


def parse_rules(text: str) -> dict[str, Expression]:
    """The rules of a grammar by name, in order.

    PaskError that says line and column where the text is not in the notation, and for rules that
    come twice, are used but not there, or match no finite text.
    """
    try:
        parsed: Any = _parser().parse(text)
    except UnexpectedInput as error:
        raise _syntax_error(error) from None
    rules = _by_name(parsed, text)
    for expression in rules.values():
        for reference in references(expression):
            if reference.name not in rules:
                raise PaskError(
                    f"there is no rule {reference.name!r}",
                    where=reference.where,
                    todo=known_names(reference.name, rules),
                )
    finite = rules_that(rules, _finite)
    for name in rules:
        if name not in finite:
            raise PaskError(
                f"rule {name!r} matches no finite text: every alternative of it needs it again",
                where="EBNF grammar",
                todo="give it an alternative that ends",
            )
    return rules


def references(expression: Expression) -> Iterator[Reference]:
    """All uses of rules, in order."""
    if isinstance(expression, Reference):
        yield expression
    for part in _parts(expression):
        yield from references(part)


def rules_that(
    rules: Mapping[str, Expression], holds: Callable[[Expression, Collection[str]], bool]
) -> frozenset[str]:
    """The least set of rules for which `holds(expression, the set)` is true."""
    found: set[str] = set()
    while True:
        more = {name for name in rules if name not in found and holds(rules[name], found)}
        if not more:
            return frozenset(found)
        found |= more


def _by_name(parsed: Iterable[tuple[Token, Expression]], text: str) -> dict[str, Expression]:
    rules: dict[str, Expression] = {}
    for token, expression in parsed:
        name, where = str(token), _where(token)
        line_start = max(text.rfind(end, 0, token.start_pos) for end in "\n\r") + 1
        if text[line_start : token.start_pos].strip():
            raise PaskError(f"rule {name!r} must begin a line", where=where)
        if name in rules:
            raise PaskError(
                f"rule {name!r} is defined twice", where=where, todo="join the definitions with |"
            )
        if name in _RESERVED:
            raise PaskError(f"{name!r} cannot name a rule", where=where, todo="rename it")
        rules[name] = expression
    return rules


def _parts(expression: Expression) -> tuple[Expression, ...]:
    if isinstance(expression, Concatenation):
        return expression.parts
    if isinstance(expression, Alternation):
        return expression.choices
    return (expression.part,) if isinstance(expression, Repetition) else ()


def _finite(expression: Expression, rules: Collection[str]) -> bool:
    if isinstance(expression, Reference):
        return expression.name in rules
    if isinstance(expression, Alternation):
        return any(_finite(choice, rules) for choice in expression.choices)
    if isinstance(expression, Repetition) and expression.low == 0:
        return True
    return all(_finite(part, rules) for part in _parts(expression))


@cache
def _parser() -> Lark:
    return Lark(_NOTATION, parser="lalr", propagate_positions=True, transformer=_Rules())


@v_args(inline=True)
class _Rules(Transformer[Token, Any]):
    """Makes expressions while the text is being parsed."""

    def start(self, *rules: tuple[Token, Expression]) -> tuple[tuple[Token, Expression], ...]:
        return rules

    def rule(self, name: Token, expression: Expression, _: Expression | None) -> Any:
        return name, expression

    def alternation(self, *choices: Expression) -> Expression:
        return choices[0] if len(choices) == 1 else Alternation(choices)

    def concatenation(self, *parts: Expression) -> Expression:
        return parts[0] if len(parts) == 1 else Concatenation(parts)

    def group(self, inner: Expression | None) -> Expression:
        return Concatenation(()) if inner is None else inner

    def repetition(self, part: Expression, sign: Token) -> Expression:
        if sign.type != "COUNT":
            return Repetition(part, int(sign == "+"), 1 if sign == "?" else None)
        low, comma, high = (piece.strip() for piece in sign[1:-1].partition(","))
        if max(len(low), len(high)) > 9:  # more digits than any count that fits in memory
            raise PaskError("a count of more than 9 digits", where=_where(sign))
        most = int(low) if not comma else int(high) if high not in ("", "-1") else None
        if most is not None and most < int(low):
            raise PaskError(
                f"{sign}: at most {most} is less than at least {low}", where=_where(sign)
            )
        return Repetition(part, int(low), most)

    def reference(self, name: Token) -> Expression:
        return Reference(str(name), _where(name))

    def literal(self, quoted: Token) -> Expression:
        return Literal(literal_bytes(quoted, _where(quoted)))

    def character_class(self, bracketed: Token) -> Expression:
        return CharacterClass(class_ranges(bracketed, _where(bracketed)))


def _where(token: Token) -> str:
    return f"EBNF grammar, line {token.line}, column {token.column}"


def _syntax_error(error: UnexpectedInput) -> PaskError:
    expected: Collection[str] = ()
    found = "something else"
    if isinstance(error, UnexpectedCharacters):
        expected, found = error.allowed or (), repr(error.char)
        if error.char in '"[':
            found += " without its end on the same line"
    elif isinstance(error, UnexpectedToken):
        expected = error.expected
        found = repr(str(error.token)) if error.token else "the end of the text"
    # Where a rule may end, almost anything may follow: a list would not help.
    listed = "RULE" not in expected or len(expected) < 3
    signs = [_SPOKEN[name] for name in _SPOKEN if name in expected] if listed else []
    return PaskError(
        f"{found} is not expected here",
        where=f"EBNF grammar, line {error.line}, column {error.column}",
        todo=f"write {' or '.join(signs)}" if signs else "",
    )
