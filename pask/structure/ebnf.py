"""A grammar written by hand that yields tags: rules of EBNF, some of them with a role.

The notation is xgrammar's (`pask.structure.ebnf_notation`), so the one text is compiled there for
the masks and walked here for the tags. Any such grammar will do: recursion on either side, empty
alternatives and ambiguity included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from pask.errors import PaskError, known_names
from pask.structure.automaton import (
    CLOSES,
    OPENS,
    Edge,
    Edges,
    Grown,
    State,
    TagGrammar,
    Unit,
    common_path,
)
from pask.structure.ebnf_graph import Arc, Node, rule_graphs
from pask.structure.ebnf_notation import parse_rules
from pask.structure.tags import CHOSEN_ROLES, CONSEQUENCE, RANK, Role, TokenClass

_OUTERMOST = Unit(TokenClass.SCAFFOLD, Role.LAYOUT)


class Use:
    """One use of a rule, begun at one state; `callers` are the places that go on after it.

    All callers of a rule at a state share its use, so nested alternatives do not multiply.
    """

    __slots__ = ("callers",)

    def __init__(self) -> None:
        self.callers: set[Place] = set()


class Place(NamedTuple):
    """One reading of the text so far.

    `use` is what goes on when the rule ends, None for the end of the text; `bound` says that the
    unit ends with the rule.
    """

    node: Node
    use: Use | None
    unit: Unit
    bound: bool


class _Step(NamedTuple):
    """A byte range that a reading can take, and the reading then; `opens` its unit with it."""

    arc: Arc
    target: Place
    opens: bool


class EbnfGrammar(TagGrammar):
    """The texts of the rule `root`, tagged by the roles of the rules that they are made of.

    `text`: the rules; `roles`: rule name -> class and role of the text that it matches. A rule
    without a role is part of the unit that uses it; outermost, it is layout, without opening and
    closing. Each use of a rule with a role is a unit of its own: it opens at its first byte and
    closes at a byte after which nothing of it can follow. Of several readings the most
    consequential one is told, and it opens or closes only if all such readings do. A unit's path
    holds the rules with roles that lead to it; a rule that is used inside itself stands there
    once, so that recursion does not lengthen it.

    PaskError for a text that is not a grammar, for an unknown root, and for a role of a rule that
    does not exist or of a class that it does not go with.
    """

    def __init__(
        self, text: str, roles: Mapping[str, tuple[TokenClass, Role]], root: str = "root"
    ) -> None:
        try:
            rules = parse_rules(text)
            self._graphs = rule_graphs(rules)
        except RecursionError:
            raise PaskError("groups are nested too deeply", where="EBNF grammar") from None
        for name in roles:
            if name not in rules:
                raise PaskError(
                    f"a role is given to {name!r}, which is no rule",
                    where="EBNF grammar",
                    todo=known_names(name, rules),
                )
            if roles[name] not in RANK:
                raise PaskError(
                    f"the tag's class and role do not go together: {', '.join(roles[name])}",
                    where=f"EBNF grammar, role of {name!r}",
                    todo=_pairs_like(roles[name]),
                )
        if root not in rules:
            raise PaskError(
                f"there is no root rule {root!r}",
                where="EBNF grammar",
                todo=known_names(root, rules),
            )
        self._roles = dict(roles)
        self._states: dict[frozenset[Place], State] = {}
        bound, unit = self._unit(root, False, _OUTERMOST)
        first = Place(self._graphs[root], None, unit, bound)
        super().__init__(State(lambda: self._grow([first], opens=bound)))

    def _unit(self, rule: str, bound: bool, outer: Unit) -> tuple[bool, Unit]:
        """The unit of a rule's text, and whether it ends with the rule."""
        if rule not in self._roles:
            return bound, outer
        path = outer.path
        above = path[: path.index(rule)] if rule in path else path
        return True, Unit(*self._roles[rule], (*above, rule))

    def _state(self, places: Iterable[Place]) -> State:
        """The one state of these readings."""
        key = frozenset(places)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = State(lambda: self._grow(key, opens=False))
        return state

    def _grow(self, places: Iterable[Place], opens: bool) -> Grown:
        steps, final = self._expand(places, opens)
        edges: Edges = {}
        begin: dict[int, list[_Step]] = {}
        for step in steps:
            begin.setdefault(step.arc.first, []).append(step)
        cuts = {step.arc.last + 1 for step in steps} | set(begin)
        here: list[_Step] = []
        for first, after in pairwise(sorted(cuts)):  # the same steps take all bytes in between
            here = [step for step in here if step.arc.last >= first] + begin.get(first, [])
            if here:
                edges |= dict.fromkeys(range(first, after), self._edge(here))
        return edges, final

    def _expand(self, places: Iterable[Place], opens: bool) -> tuple[list[_Step], bool]:
        """All steps from these readings into rules and out of them, and whether the text may end.

        Rules that match the empty text are passed by in `Node.reach`, so a use that begins here
        never ends here.
        """
        steps: list[_Step] = []
        final = False
        begun: dict[tuple[str, Unit], Use] = {}
        pending = [(place, opens) for place in places]
        seen = set(pending)
        while pending:
            place, opens = pending.pop()
            node, use, unit, bound = place
            reach = node.reach
            steps += [_Step(a, Place(a.target, use, unit, bound), opens) for a in reach.arcs]
            following: list[tuple[Place, bool]] = []
            for rule, after in reach.calls:
                if after.only_ends:
                    # What follows the caller follows the rule: a chain of uses stays short.
                    inner_bound, inner_unit, inner_use = *self._unit(rule, bound, unit), use
                else:
                    inner_bound, inner_unit = self._unit(rule, False, unit)
                    inner_use = begun.setdefault((rule, inner_unit), Use())
                    inner_use.callers.add(Place(after, use, unit, bound))
                inner = Place(self._graphs[rule], inner_use, inner_unit, inner_bound)
                following.append((inner, opens or rule in self._roles))
            if reach.ends and use is None:
                final = True
            elif reach.ends and use is not None and use not in begun.values():
                following += [(caller, False) for caller in use.callers]
            pending += [found for found in following if found not in seen]
            seen.update(following)
        return steps, final

    def _edge(self, steps: list[_Step]) -> Edge:
        rank = min(step.target.unit.rank for step in steps)
        best = [step for step in steps if step.target.unit.rank == rank]
        unit = best[0].target.unit
        phase = OPENS if all(step.opens for step in best) else 0
        # Layout outside all units has no end.
        if unit.path and not any(_goes_on(step.target) for step in best):
            phase |= CLOSES
        alternatives = {(step.arc.leaf, step.target.unit) for step in steps}
        shared = unit.role in CHOSEN_ROLES and len(alternatives) > 1
        decided = unit._replace(path=common_path([step.target.unit.path for step in steps]))
        return Edge(rank, phase, shared, self._state(step.target for step in steps), decided)


def _goes_on(place: Place) -> bool:
    """Whether the reading's unit, what is nested in it included, can have another byte."""
    pending, seen = [place], {place}
    while pending:
        place = pending.pop()
        reach = place.node.reach
        if reach.more:
            return True
        if reach.ends and not place.bound and place.use is not None:
            pending += place.use.callers - seen
            seen |= place.use.callers
    return False


def _pairs_like(wanted: tuple[TokenClass, Role]) -> str:
    """The legal pairs that share a half with this one."""
    near = [pair for pair in CONSEQUENCE if pair[0] == wanted[0] or pair[1] == wanted[1]]
    return f"choose one of {'; '.join(' '.join(pair) for pair in near or CONSEQUENCE)}"
