"""JSON values in a fixed layout as states: exactly what xgrammar makes of the same JSON Schema.

The layout is that of `json.dumps` with its default separators and `ensure_ascii=False`; keys come
in the schema's order. Strings are UTF-8 without control characters, with JSON's escapes; as
xgrammar does, they let surrogates through (ED A0 80 and the like), which no text holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pask.structure.automaton import (
    CLOSES,
    OPENS,
    Edge,
    Edges,
    Grown,
    State,
    Unit,
    byte_set,
    joined,
    text,
    union,
)
from pask.structure.tags import Role, TokenClass

COMMA, COLON = b", ", b": "

JsonSchema = Mapping[str, Any]

_PLAIN = tuple(byte for byte in range(0x20, 0x80) if byte not in b'"\\')
_DIGITS, _NONZERO, _HEX = b"0123456789", b"123456789", b"0123456789abcdefABCDEF"
_MORE = range(0x80, 0xC0)
# UTF-8's lead bytes and the bytes that follow them.
_LEADS: tuple[tuple[range, ...], ...] = (
    (range(0xC2, 0xE0), _MORE),
    (range(0xE0, 0xE1), range(0xA0, 0xC0), _MORE),
    (range(0xE1, 0xF0), _MORE, _MORE),
    (range(0xF0, 0xF1), range(0x90, 0xC0), _MORE, _MORE),
    (range(0xF1, 0xF4), _MORE, _MORE, _MORE),
    (range(0xF4, 0xF5), range(0x80, 0x90), _MORE, _MORE),
)


@dataclass(frozen=True)
class Place:
    """Where a value stands: its role, and the names that lead to it."""

    role: Role
    path: tuple[str, ...]

    def unit(self, token_class: TokenClass) -> Unit:
        return Unit(token_class, self.role, self.path)

    def inner(self, *names: str) -> Place:
        """A place inside this value."""
        return Place(Role.NESTED, (*self.path, *names))


def check_schema(schema: JsonSchema, where: str) -> None:
    """ValueError, saying where, for a schema that has no grammar here."""
    kind = schema.get("type")
    if "enum" in schema:
        if not schema["enum"]:
            raise ValueError(f"{where}: an enumeration without values admits nothing")
    elif kind == "array":
        check_schema(schema.get("items", {}), f"{where}, items")
    elif kind == "object" and schema.get("additionalProperties") is not True:
        if "properties" not in schema:
            raise ValueError(f"{where}: an object needs properties, or additionalProperties: true")
        unknown = set(schema.get("required", ())) - set(schema["properties"])
        if unknown:
            raise ValueError(f"{where}: {sorted(unknown)[0]!r} is required and not declared")
        for name, inner in schema["properties"].items():
            check_schema(inner, f"{where}, {name!r}")
    elif kind not in (None, "object", "string", "integer", "number", "boolean"):
        raise ValueError(f"{where}: no grammar for a value of type {kind!r}")


def value(schema: JsonSchema, place: Place, then: State) -> State:
    """Any value that the schema admits, and then `then`; see `check_schema`."""
    if "enum" in schema:
        return _enum(schema["enum"], place.path, then)
    kind = schema.get("type")
    if kind is None:
        return _any(place, then)
    if kind == "object":
        if schema.get("additionalProperties") is True:
            return _free_object(place, then)
        inner = place.inner()
        return members(schema, inner, inner.unit(TokenClass.BOUNDARY), then)
    if kind == "array":
        return _array(schema.get("items", {}), place, then)
    if kind == "string":
        return string(place.unit(TokenClass.STRING), then)
    if kind in ("integer", "number"):
        return _number(place.unit(TokenClass.NUMBER), then, whole=kind == "integer")
    assert kind == "boolean", kind
    return _literals((b"true", b"false"), place.unit(TokenClass.BOOLEAN), then)


def literal(value: Any) -> bytes:
    """A value as the layout writes it. xgrammar escapes DEL, which JSON allows as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f").encode()


def members(schema: JsonSchema, place: Place, bracket: Unit, then: State) -> State:
    """An object of declared keys, in their order; the optional ones may be left out.

    `bracket` is the unit of its braces and commas. Where `place` is nested, so are its keys and
    values; else it holds a call's arguments, required and optional.
    """
    return text(b"{", bracket, _Members(schema, place, bracket, then).after(0), OPENS)


@dataclass
class _Members:
    schema: JsonSchema
    place: Place
    bracket: Unit
    then: State

    def __post_init__(self) -> None:
        self._names = list(self.schema["properties"])
        self._required = frozenset(self.schema.get("required", ()))
        self._close = text(b"}", self.bracket, self.then, CLOSES)
        self._made: dict[int, State] = {}
        self._members: dict[int, State] = {}

    def after(self, done: int) -> State:
        """The members before `done` are written or left out, the last of them written."""
        if done not in self._made:
            self._made[done] = State(lambda: self._grow(done))
        return self._made[done]

    def _grow(self, done: int) -> Grown:
        starts: list[State] = []
        for at in range(done, len(self._names)):
            if at not in self._members:
                self._members[at] = self._member(at)
            starts.append(self._members[at])
            if self._names[at] in self._required:
                break
        else:
            if not done:
                return union([*starts, self._close]).grown
            if not starts:
                return self._close.grown
            return union([text(COMMA, self.bracket, union(starts), 0), self._close]).grown
        following = union(starts)
        return (text(COMMA, self.bracket, following, 0) if done else following).grown

    def _member(self, at: int) -> State:
        name = self._names[at]
        required = name in self._required
        path = (*self.place.path, name)
        if self.place.role is Role.NESTED:
            key_role, inner = Role.NESTED, Place(Role.NESTED, path)
        elif required:
            key_role, inner = Role.REQUIRED_KEY, Place(Role.REQUIRED_VALUE, path)
        else:
            key_role, inner = Role.OPTIONAL_KEY, Place(Role.OPTIONAL_VALUE, path)
        content = State(
            lambda: value(self.schema["properties"][name], inner, self.after(at + 1)).grown
        )
        colon = text(COLON, LAYOUT, content, 0)
        return text(literal(name), Unit(TokenClass.KEY, key_role, path), colon)


LAYOUT = Unit(TokenClass.SCAFFOLD, Role.LAYOUT)


def _enum(values: Sequence[Any], path: tuple[str, ...], then: State) -> State:
    written = {literal(value): class_of(value) for value in values}  # a value may be listed twice
    return union(
        text(spelled, Unit(token_class, Role.ENUM, path), then)
        for spelled, token_class in written.items()
    )


def class_of(value: Any) -> TokenClass:
    """The class of a string, number, boolean or null."""
    if value is None:
        return TokenClass.NULL
    if isinstance(value, bool):
        return TokenClass.BOOLEAN
    return TokenClass.STRING if isinstance(value, str) else TokenClass.NUMBER


def _literals(words: Sequence[bytes], unit: Unit, then: State) -> State:
    return union(text(word, unit, then) for word in words)


def _any(place: Place, then: State) -> State:
    """Free form: a value of any type, whose class its first byte decides."""
    return State(
        lambda: joined(
            state.grown
            for state in (
                string(place.unit(TokenClass.STRING), then),
                _number(place.unit(TokenClass.NUMBER), then, whole=False),
                _literals((b"true", b"false"), place.unit(TokenClass.BOOLEAN), then),
                _literals((b"null",), place.unit(TokenClass.NULL), then),
                _array({}, place, then),
                _free_object(place, then),
            )
        )
    )


def _array(items: JsonSchema, place: Place, then: State) -> State:
    bracket = place.inner().unit(TokenClass.BOUNDARY)
    close = text(b"]", bracket, then, CLOSES)
    item = State(lambda: value(items, place.inner(), after).grown)
    after = State(lambda: union([text(COMMA, bracket, item, 0), close]).grown)
    return text(b"[", bracket, union([item, close]), OPENS)


def _free_object(place: Place, then: State) -> State:
    bracket = place.inner().unit(TokenClass.BOUNDARY)
    close = text(b"}", bracket, then, CLOSES)
    content = State(lambda: _any(place.inner(), after).grown)
    key = string(place.inner().unit(TokenClass.KEY), text(COLON, LAYOUT, content, 0))
    after = State(lambda: union([text(COMMA, bracket, key, 0), close]).grown)
    return text(b"{", bracket, union([key, close]), OPENS)


def string(unit: Unit, then: State) -> State:
    """A JSON string, quotes included."""
    body = State(lambda: (_string_edges(unit, body, then), False))
    return State(lambda: (byte_set(b'"', unit, body, OPENS), False))


def _string_edges(unit: Unit, body: State, then: State) -> Edges:
    edges = byte_set(_PLAIN, unit, body)
    edges[0x22] = Edge(unit.rank, CLOSES, False, then, unit)
    edges[0x5C] = Edge(unit.rank, 0, False, State(lambda: _escape(unit, body)), unit)
    for leads, *ranges in _LEADS:
        edges |= byte_set(leads, unit, _run(ranges, unit, body))
    return edges


def _run(ranges: Sequence[Iterable[int]], unit: Unit, then: State) -> State:
    """One byte of each range."""
    if not ranges:
        return then
    return State(lambda: (byte_set(ranges[0], unit, _run(ranges[1:], unit, then)), False))


def _escape(unit: Unit, body: State) -> Grown:
    hexadecimal = _run([_HEX] * 4, unit, body)
    return byte_set(b'"\\/bfnrt', unit, body) | byte_set(b"u", unit, hexadecimal), False


def _number(unit: Unit, then: State, *, whole: bool) -> State:
    """JSON's numbers; a whole one has neither fraction nor exponent, and no negative zero."""

    def run(following: Callable[[], Edges]) -> State:
        """One or more digits are written: more of them, or what may follow, or the end."""
        here = State(
            lambda: joined([(byte_set(_DIGITS, unit, here) | following(), False), then.grown])
        )
        return here

    def step(grow: Callable[[], Edges]) -> State:
        return State(lambda: (grow(), False))

    if whole:
        digits = run(dict)
        zero, after_sign = byte_set(b"0", unit, then, OPENS | CLOSES), {}
    else:
        in_exponent = run(dict)
        signed = step(lambda: byte_set(_DIGITS, unit, in_exponent))
        exponent = step(
            lambda: byte_set(b"+-", unit, signed) | byte_set(_DIGITS, unit, in_exponent)
        )
        fraction = run(lambda: byte_set(b"eE", unit, exponent))
        point = step(lambda: byte_set(_DIGITS, unit, fraction))
        tail = byte_set(b".", unit, point) | byte_set(b"eE", unit, exponent)
        digits = run(lambda: tail)
        at_zero = State(lambda: joined([(tail, False), then.grown]))
        zero, after_sign = byte_set(b"0", unit, at_zero, OPENS), byte_set(b"0", unit, at_zero)
    sign = State(grown=(byte_set(_NONZERO, unit, digits) | after_sign, False))
    first = zero | byte_set(_NONZERO, unit, digits, OPENS) | byte_set(b"-", unit, sign, OPENS)
    return State(grown=(first, False))
