"""The structural tag z = (class, role, state, next) of an accepted token (the paper's Equation 3).

A tag is made from the grammar and the accepted bytes alone: no attention, no later token and no
reference answer enters it. This module is its vocabulary, in the one order that decides everything.

- class: what the token is, as text.
- role: what it is responsible for in the answer.
- state: (phase, choice). The phase says which part of its unit the token is: names, keys and
  strings open and close with their quotes; brackets, and the text around calls, open or close the
  thing they stand around; commas and layout are always inside. A number has no last byte that
  could be known (another digit may follow), so it opens and never closes. The choice says whether
  the grammar left any.
- next: how far the frontier, where the next byte will go, is from a critical state.

**Critical** is a state in which the next byte is not forced (two bytes are legal, or one and the
end) and one of the legal bytes belongs to a role in `CRITICAL_ROLES`: which function, which
argument, which value, whether to go on. The distance is counted in bytes.

**Consequence.** A token that holds bytes of several units is tagged as the most consequential one,
the first in `CONSEQUENCE`: a wrong function fails the call whatever follows, a wrong value fails an
argument, punctuation follows from what stands around it. Of several units of equal consequence all
phases count, and the choice is shared if it is so for the last of them.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import NamedTuple


class TokenClass(StrEnum):
    FUNCTION_NAME = "function_name"
    STRING = "string"
    NUMBER = "number"
    BOOLEAN = "boolean"
    NULL = "null"
    KEY = "key"
    BOUNDARY = "boundary"  # opens, separates or closes calls, arguments, lists, objects
    SCAFFOLD = "scaffold"  # the layout's fixed text


class Role(StrEnum):
    FUNCTION_SELECTOR = "function_selector"
    ENUM = "enum"  # a value from a list of the schema's, also inside a list or object
    REQUIRED_VALUE = "required_value"
    OPTIONAL_VALUE = "optional_value"
    REQUIRED_KEY = "required_key"
    OPTIONAL_KEY = "optional_key"
    NESTED = "nested"  # an argument's list or object: its brackets, and keys and values in them
    CALL_BOUNDARY = "call_boundary"
    ARGUMENT_BOUNDARY = "argument_boundary"
    LAYOUT = "layout"


class Phase(StrEnum):
    OPENING = "opening"
    INSIDE = "inside"
    CLOSING = "closing"
    WHOLE = "whole"  # holds an opening and a closing byte: a whole unit, or an end and a beginning


class Choice(StrEnum):
    FREE = "free"  # at one of the token's bytes another byte, or the end, would have been legal
    SHARED = "shared"  # forced, but what is being spelled is still one of several alternatives
    FORCED = "forced"


class Next(StrEnum):
    CRITICAL = "critical"  # the next byte is a critical choice
    NEAR = "near"  # one is 1 to NEAR_BYTES bytes ahead
    FAR = "far"  # none is that near
    END = "end"  # none is that near, and the text ends before


_VALUES = (TokenClass.STRING, TokenClass.NUMBER, TokenClass.BOOLEAN, TokenClass.NULL)

CONSEQUENCE: tuple[tuple[TokenClass, Role], ...] = (
    (TokenClass.FUNCTION_NAME, Role.FUNCTION_SELECTOR),
    *((token_class, Role.ENUM) for token_class in _VALUES),
    *(
        (token_class, role)
        for role in (Role.REQUIRED_VALUE, Role.OPTIONAL_VALUE, Role.NESTED)
        for token_class in _VALUES
    ),
    (TokenClass.KEY, Role.REQUIRED_KEY),
    (TokenClass.KEY, Role.OPTIONAL_KEY),
    (TokenClass.KEY, Role.NESTED),
    (TokenClass.BOUNDARY, Role.CALL_BOUNDARY),
    (TokenClass.BOUNDARY, Role.ARGUMENT_BOUNDARY),
    (TokenClass.BOUNDARY, Role.NESTED),
    (TokenClass.SCAFFOLD, Role.LAYOUT),
)
RANK = {pair: rank for rank, pair in enumerate(CONSEQUENCE)}  # 0 is the most consequential

CRITICAL_ROLES = frozenset(Role) - {Role.LAYOUT}

# Units that are chosen from a list of the grammar's, so that spelling one can still mean another.
CHOSEN_ROLES = frozenset(
    {Role.FUNCTION_SELECTOR, Role.ENUM, Role.REQUIRED_KEY, Role.OPTIONAL_KEY, Role.NESTED}
)

NEAR_BYTES = 8  # about two tokens: the rest of a key and its colon, but not `, "arguments": {`


class Tag(NamedTuple):
    """z of one token; hashable, so that it is a bucket's key."""

    token_class: TokenClass
    role: Role
    phase: Phase
    choice: Choice
    next: Next

    @property
    def state(self) -> tuple[Phase, Choice]:
        """The tag's third part as Equation 3 counts them."""
        return self.phase, self.choice

    def __str__(self) -> str:
        return f"({self.token_class}, {self.role}, {self.phase}/{self.choice}, {self.next})"


@cache
def tag(rank: int, opens: bool, closes: bool, choice: Choice, next_: Next) -> Tag:
    """The tag of a token whose most consequential unit has that rank in `CONSEQUENCE`."""
    token_class, role = CONSEQUENCE[rank]
    phase = (
        Phase.WHOLE
        if opens and closes
        else Phase.OPENING
        if opens
        else Phase.CLOSING
        if closes
        else Phase.INSIDE
    )
    return Tag(token_class, role, phase, choice, next_)
