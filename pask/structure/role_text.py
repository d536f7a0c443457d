"""The calls of an answer as an EBNF text for xgrammar, each of whose rules has one role.

Written so that the rules which xgrammar's parser is in say what a byte is:
- a rule's own literal comes before the rules that it refers to, so a rule that can take a byte is
  always in the middle of its own literal, and its role is the byte's;
- what may be spelled in place of another thing (a function, a key, an enumeration's value) is a
  rule of its own; it never stands first in another rule, for xgrammar would dissolve it there;
- `inner` rules go on with a unit that another rule began (the rest of a string or number).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pask.structure.call_layout import CallLayout
from pask.structure.tags import RANK, Role, TokenClass


class Rule(NamedTuple):
    """What a byte of the rule's own literal is."""

    token_class: TokenClass
    role: Role
    alternative: str  # names what is spelled; rules of one string or number share it
    inner: bool = False
    opens: bool | None = None  # None, for both: from where the byte stands in its unit
    closes: bool | None = None
    after: str = ""  # the key that ends where this rule begins

    @property
    def rank(self) -> int:
        return RANK[self.token_class, self.role]


_ENUM_CLASSES = {
    str: TokenClass.STRING,
    int: TokenClass.NUMBER,
    float: TokenClass.NUMBER,
    bool: TokenClass.BOOLEAN,
    type(None): TokenClass.NULL,
}


def _quoted(text: str) -> str:
    """An EBNF literal."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if " " <= c <= "~" else f"\\U{ord(c):08x}" for c in plain) + '"'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class RoleText:
    """The EBNF text of one or more calls; `rules`: what each of its rules means, by name.

    `functions`: name -> JSON Schema of its arguments object; ValueError for a type that has no
    grammar.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], layout: CallLayout) -> None:
        self.rules: dict[str, Rule] = {}
        self._lines: dict[str, str] = {}
        boundary = (TokenClass.BOUNDARY, Role.CALL_BOUNDARY)
        first = "open" if layout.open else "brace"
        again = "separator" if layout.separator else first
        self._add("root", boundary, [f"{_quoted(layout.begin)} {first}"], opens=True, closes=False)
        self._add("open", boundary, [f"{_quoted(layout.open)} brace"], opens=True, closes=False)
        self._add("brace", boundary, ['"{" name'], opens=True, closes=False)
        close = _quoted("}" + layout.close)
        ends = [f"{close} {again}", f"{close} end" if layout.end else close]
        self._add("close", boundary, ends, opens=False, closes=True)
        separator = f"{_quoted(layout.separator)} {first}"
        self._add("separator", boundary, [separator], opens=False, closes=False)
        self._add("end", boundary, [_quoted(layout.end)], opens=False, closes=True)
        names = [f"function-{at}" for at in range(len(functions))]
        self._layout("name", '"name": ', names)
        for at, (name, schema) in enumerate(functions.items()):
            unit = (TokenClass.FUNCTION_NAME, Role.FUNCTION_SELECTOR)
            self._add(names[at], unit, [f"{_quoted(_json(name))} arguments-{at}"])
            arguments = self._object(schema, None, Role.ARGUMENT_BOUNDARY, " close")
            self._layout(f"arguments-{at}", ', "arguments": ', [arguments])

    def __str__(self) -> str:
        """EBNF in xgrammar's notation; its first rule is `root`."""
        return "\n".join(f"{name} ::= {body}" for name, body in self._lines.items()) + "\n"

    def _add(
        self,
        name: str,
        unit: tuple[TokenClass, Role],
        bodies: Iterable[str],
        alternative: str = "",
        **more: Any,
    ) -> str:
        self.rules[name] = Rule(*unit, alternative or name, **more)
        self._lines[name] = " | ".join(bodies)
        return name

    def _layout(self, name: str, text: str, following: Sequence[str], after: str = "") -> str:
        bodies = [f"{_quoted(text)} {rest}" for rest in following]
        unit = (TokenClass.SCAFFOLD, Role.LAYOUT)
        return self._add(name, unit, bodies, opens=False, closes=False, after=after)

    def _value(self, schema: Mapping[str, Any], role: Role) -> list[str]:
        """The rules of the alternatives that a value of this schema has."""
        if "enum" in schema:
            start = f"enum-{len(self.rules)}"
            texts = {_json(value): _ENUM_CLASSES[type(value)] for value in schema["enum"]}
            return [
                self._add(f"{start}-{at}", (kind, Role.ENUM), [_quoted(text)])
                for at, (text, kind) in enumerate(texts.items())
            ]
        kind = schema.get("type")
        if kind == "string":
            return [self._string(TokenClass.STRING, role)]
        if kind in ("integer", "number"):
            return [self._number(role, whole=kind == "integer")]
        if kind == "boolean":
            return [self._word(word, TokenClass.BOOLEAN, role) for word in ("true", "false")]
        if kind == "array":
            return [self._array(schema.get("items", {}))]
        if kind == "object" and schema.get("additionalProperties") is True:
            return [self._free_object()]
        if kind == "object":
            return [self._object(schema, Role.NESTED, Role.NESTED, "")]
        if kind is not None:
            raise ValueError(f"no grammar for a value of type {kind!r}")
        kinds_of_json = ("string", "number", "boolean", "array")
        any_value = [rule for kind in kinds_of_json for rule in self._value({"type": kind}, role)]
        return [*any_value, self._word("null", TokenClass.NULL, role), self._free_object()]

    def _word(self, word: str, token_class: TokenClass, role: Role) -> str:
        return self._add(f"{word}-{role}", (token_class, role), [_quoted(word)])

    def _string(self, token_class: TokenClass, role: Role, then: str = "") -> str:
        """A whole string; `then` follows it."""
        unit = (token_class, role)
        name = f"{token_class}-{role}"
        body = f"{name}-body"
        code = " ".join(["[0-9A-Fa-f]"] * 4)
        plain = [f"[^\\0-\\x1f\"\\\\] {body}", f'"\\"" {then}',
                 f'"\\\\" [\\"\\\\/bfnrt] {body}', f'"\\\\u" {code} {body}']  # fmt: skip
        self._add(body, unit, plain, name, inner=True)
        return self._add(name, unit, [f'"\\"" {body}'])

    def _number(self, role: Role, *, whole: bool) -> str:
        unit = (TokenClass.NUMBER, role)
        name = f"{'integer' if whole else 'number'}-{role}"
        tail = [] if whole else [f'"." {name}-point', f"[eE] {name}-exponent"]
        bodies = {
            "digits": ['""', f"[0-9] {name}-digits", *tail],
            "zero": ['""', *tail],
            "minus": [f"[1-9] {name}-digits", *([] if whole else [f'"0" {name}-zero'])],
            "point": [f"[0-9] {name}-fraction"],
            "fraction": ['""', f"[0-9] {name}-fraction", f"[eE] {name}-exponent"],
            "exponent": [f"[+\\-] {name}-power", f"[0-9] {name}-powers"],
            "power": [f"[0-9] {name}-powers"],
            "powers": ['""', f"[0-9] {name}-powers"],
        }
        for part in ("digits", "minus") if whole else bodies:
            self._add(f"{name}-{part}", unit, bodies[part], name, inner=True)
        zero = '"0"' if whole else f'"0" {name}-zero'
        return self._add(name, unit, [f'"-" {name}-minus', f"[1-9] {name}-digits", zero])

    def _array(self, items: Mapping[str, Any]) -> str:
        free = not items
        name = "array-free" if free else f"array-{len(self.rules)}"
        if name in self.rules:
            return name
        unit = (TokenClass.BOUNDARY, Role.NESTED)
        self._add(name, unit, ())  # known before its items are: they may hold it
        rest = f"{name}-rest"
        self._add(rest, unit, ())
        values = self._value(items, Role.NESTED)
        self._add(rest, unit, [*(f'", " {value} {rest}' for value in values), '"]"'])
        return self._add(name, unit, [*(f'"[" {value} {rest}' for value in values), '"[" "]"'])

    def _free_object(self) -> str:
        name, unit = "object-free", (TokenClass.BOUNDARY, Role.NESTED)
        if name not in self.rules:
            self._add(name, unit, ())
            key = self._string(TokenClass.KEY, Role.NESTED, f"{name}-colon")
            self._add(f"{name}-rest", unit, [f'", " {key}', '"}"'])
            values = self._value({}, Role.NESTED)
            self._layout(f"{name}-colon", ": ", [f"{value} {name}-rest" for value in values])
            self._add(name, unit, [f'"{{" {key}', '"{" "}"'])
        return name

    def _object(
        self, schema: Mapping[str, Any], inside: Role | None, bracket: Role, then: str
    ) -> str:
        """An object of declared keys. `inside`: its keys' and values' role, None for arguments."""
        names, required = list(schema["properties"]), set(schema.get("required", ()))
        name = f"object-{len(self.rules)}"
        unit = (TokenClass.BOUNDARY, bracket)
        self._add(name, unit, ())
        for at, key in enumerate(names):
            kind = "REQUIRED" if key in required else "OPTIONAL"
            key_role = inside or Role[f"{kind}_KEY"]
            values = self._value(schema["properties"][key], inside or Role[f"{kind}_VALUE"])
            text = f"{_quoted(_json(key))} {name}-colon-{at}"
            self._add(f"{name}-key-{at}", (TokenClass.KEY, key_role), [text])
            following = [f"{value} {name}-rest-{at + 1}" for value in values]
            self._layout(f"{name}-colon-{at}", ": ", following, f"{name}-key-{at}")
        for done in range(len(names) + 1):
            needed = [at for at in range(done, len(names)) if names[at] in required]
            last = needed[0] + 1 if needed else len(names)
            before = '", "' if done else '"{"'
            bodies = [f"{before} {name}-key-{at}" for at in range(done, last)]
            if not needed:
                bodies.append(f'"}}"{then}' if done else f'"{{" "}}"{then}')
            self._add(f"{name}-rest-{done}" if done else name, unit, bodies)
        return name
