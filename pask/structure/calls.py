"""Function calls as a grammar that yields tags: which function, which arguments, which values.

The calls of one answer, in any answer form: each is `{"name": ..., "arguments": {...}}` of one of
the functions, with the arguments' JSON Schema and the layout of `pask.structure.json_values`.
"""

from __future__ import annotations

from collections.abc import Mapping

from pask.structure.automaton import CLOSES, END, OPENS, State, TagGrammar, Unit, text, union
from pask.structure.call_layout import CallLayout
from pask.structure.json_values import (
    LAYOUT,
    JsonSchema,
    Place,
    check_schema,
    literal,
    members,
)
from pask.structure.tags import Role, TokenClass

_BOUNDARY = Unit(TokenClass.BOUNDARY, Role.CALL_BOUNDARY)


class CallGrammar(TagGrammar):
    """The answers that hold one or more calls of these functions.

    `functions`: name -> JSON Schema of its arguments object (declared keys, in order), as in
    `pask.bfcl.schema.arguments_schema`. ValueError for no functions, and for a schema that is not
    of this kind.
    """

    def __init__(self, functions: Mapping[str, JsonSchema], layout: CallLayout) -> None:
        if not functions:
            raise ValueError("an answer needs at least one function to call")
        for name, schema in functions.items():
            if schema.get("type") != "object" or schema.get("additionalProperties") is True:
                raise ValueError(f"function {name!r}: arguments are an object of declared keys")
            check_schema(schema, f"function {name!r}")
        self._functions = functions
        again = State(lambda: first.grown)
        end = _bound(layout.end, END, CLOSES)
        after = union([end, _bound(layout.separator, again, 0)])
        closed = text(b"}", _BOUNDARY, _bound(layout.close, after, CLOSES), CLOSES)
        names = union(self._call(name, closed) for name in functions)
        head = text(b"{", _BOUNDARY, text(b'"name": ', LAYOUT, names, 0), OPENS)
        first = _bound(layout.open, head, OPENS)
        super().__init__(_bound(layout.begin, first, OPENS))

    def _call(self, name: str, then: State) -> State:
        def arguments() -> State:
            bracket = Unit(TokenClass.BOUNDARY, Role.ARGUMENT_BOUNDARY, (name,))
            place = Place(Role.REQUIRED_VALUE, (name,))  # of the arguments; not itself nested
            return members(self._functions[name], place, bracket, then)

        rest = text(b', "arguments": ', LAYOUT, State(lambda: arguments().grown), 0)
        unit = Unit(TokenClass.FUNCTION_NAME, Role.FUNCTION_SELECTOR, (name,))
        return text(literal(name), unit, rest)


def _bound(characters: str, then: State, phase: int) -> State:
    return text(characters.encode(), _BOUNDARY, then, phase)
