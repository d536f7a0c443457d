"""The rules of an EBNF grammar as graphs over bytes, one per rule; a rule's use is an arc in them.

What a node can do before its rule's next byte or end is worked out once (`Node.reach`), so that
walking a grammar takes no empty steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

from pask.errors import PaskError
from pask.structure.ebnf_characters import ByteRange, byte_chains
from pask.structure.ebnf_notation import (
    Alternation,
    CharacterClass,
    Concatenation,
    Expression,
    Literal,
    Reference,
    Repetition,
    rules_that,
)

MOST_NODES = 50_000  # tens of MB; `[a-z]{0,1000}` makes 2,000

Leaf = Literal | CharacterClass


class Arc(NamedTuple):
    """One byte from `first` to `last`. `leaf` is the part of the notation that it stands in."""

    first: int
    last: int
    target: Node
    leaf: Leaf


class Call(NamedTuple):
    """A use of a rule, and where it goes on."""

    rule: str
    after: Node


class Reach(NamedTuple):
    """What can come next. `more`: at least one more byte can, before the rule ends."""

    arcs: tuple[Arc, ...]
    calls: tuple[Call, ...]
    ends: bool
    more: bool


class Node:
    """A place in a rule."""

    def __init__(
        self,
        facts: _Facts,
        arcs: Iterable[Arc] = (),
        call: Call | None = None,
        skips: Iterable[Node] = (),
        ends: bool = False,
    ) -> None:
        self._facts, self._arcs, self._call, self._ends = facts, tuple(arcs), call, ends
        self.skips = list(skips)

    @cached_property
    def reach(self) -> Reach:
        arcs: list[Arc] = []
        calls: list[Call] = []
        ends = False
        found, pending = {self}, [self]
        while pending:
            node = pending.pop()
            arcs += node._arcs
            ends = ends or node._ends
            following = list(node.skips)
            if node._call is not None:
                calls.append(node._call)
                if node._call.rule in self._facts.empty:
                    following.append(node._call.after)
            pending += [after for after in following if after not in found]
            found.update(following)
        more = bool(arcs) or any(call.rule in self._facts.filled for call in calls)
        return Reach(tuple(arcs), tuple(calls), ends, more)

    @property
    def only_ends(self) -> bool:
        """Whether nothing but the rule's end is left."""
        return not self.reach.arcs and not self.reach.calls


class _Facts(NamedTuple):
    empty: frozenset[str]  # the rules that match the empty text
    filled: frozenset[str]  # the rules that match any other


def rule_graphs(rules: Mapping[str, Expression]) -> dict[str, Node]:
    """Each rule's first node. PaskError for a grammar whose repetitions make it too large."""
    facts = _Facts(rules_that(rules, _can_be_empty), rules_that(rules, _can_be_filled))
    builder = _Builder(facts)
    return {name: builder.rule(name, expression) for name, expression in rules.items()}


class _Builder:
    """Builds from the end: every part is given the node that comes after it."""

    def __init__(self, facts: _Facts) -> None:
        self._facts = facts
        self._nodes = 0
        self._name = ""

    def rule(self, name: str, expression: Expression) -> Node:
        self._name = name
        return self._build(expression, self._node(ends=True))

    def _node(
        self,
        arcs: Iterable[Arc] = (),
        call: Call | None = None,
        skips: Iterable[Node] = (),
        ends: bool = False,
    ) -> Node:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise PaskError(
                f"the grammar has more than {MOST_NODES} places",
                where=f"EBNF grammar, rule {self._name!r}",
                todo="repeat less often, or without an upper bound",
            )
        return Node(self._facts, arcs, call, skips, ends)

    def _build(self, expression: Expression, then: Node) -> Node:
        match expression:
            case Literal(data):
                for byte in reversed(data):
                    then = self._node([Arc(byte, byte, then, expression)])
                return then
            case CharacterClass(ranges):
                chains = (chain for first, last in ranges for chain in byte_chains(first, last))
                return self._node(self._chain(chain, expression, then) for chain in chains)
            case Reference(name):
                return self._node(call=Call(name, then))
            case Concatenation(parts):
                for part in reversed(parts):
                    then = self._build(part, then)
                return then
            case Alternation(choices):
                return self._node(skips=[self._build(choice, then) for choice in choices])
            case Repetition(part, low, None):
                loop = self._node(skips=[then])
                loop.skips.append(self._build(part, loop))
                return self._times(part, low, loop)
            case Repetition(part, low, high):
                here = then
                for _ in range((high or 0) - low):
                    inner = self._build(part, here)
                    if inner is here:  # the part is the empty text
                        break
                    here = self._node(skips=[then, inner])
                return self._times(part, low, here)

    def _times(self, part: Expression, count: int, then: Node) -> Node:
        for _ in range(count):
            before = then
            then = self._build(part, then)
            if then is before:  # the part is the empty text
                break
        return then

    def _chain(self, chain: tuple[ByteRange, ...], leaf: Leaf, then: Node) -> Arc:
        for later in reversed(chain[1:]):
            then = self._node([Arc(*later, then, leaf)])
        return Arc(*chain[0], then, leaf)


def _can_be_empty(expression: Expression, rules: Collection[str]) -> bool:
    match expression:
        case Literal(data):
            return not data
        case CharacterClass():
            return False
        case Reference(name):
            return name in rules
        case Concatenation(parts):
            return all(_can_be_empty(part, rules) for part in parts)
        case Alternation(choices):
            return any(_can_be_empty(choice, rules) for choice in choices)
        case Repetition(part, low, _):
            return low == 0 or _can_be_empty(part, rules)


def _can_be_filled(expression: Expression, rules: Collection[str]) -> bool:
    match expression:
        case Literal(data):
            return bool(data)
        case CharacterClass():
            return True
        case Reference(name):
            return name in rules
        case Concatenation(parts) | Alternation(parts):
            return any(_can_be_filled(part, rules) for part in parts)
        case Repetition(part, _, high):
            return high != 0 and _can_be_filled(part, rules)
