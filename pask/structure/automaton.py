"""A grammar that yields tags: a graph of states over bytes that grows where it is walked.

A state says which bytes may follow, which unit each of them belongs to and where it leads. States
are built from continuations: every combinator takes the state that comes after it, so there is no
stack to keep, and a state is a plain reference to copy, compare and go back to. Edges are computed
on the first visit; a grammar is ready as soon as its start state exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from pask.structure.tags import (
    CHOSEN_ROLES,
    CRITICAL_ROLES,
    NEAR_BYTES,
    RANK,
    Next,
    Role,
    Tag,
    TokenClass,
)

OPENS, CLOSES = 1, 2  # bits of an edge's phase


class Unit(NamedTuple):
    """A stretch of text with one meaning: one name, key, value, bracket or piece of layout.

    `path`: the function, argument and inner keys it belongs to, as far as they are decided.
    """

    token_class: TokenClass
    role: Role
    path: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        return RANK[self.token_class, self.role]


class Edge(NamedTuple):
    """What one byte does. `shared`: more than one alternative of a chosen unit goes on with it."""

    rank: int
    phase: int  # OPENS if it is its unit's first byte, CLOSES if the unit cannot go on after it
    shared: bool
    target: State
    unit: Unit


Edges = dict[int, Edge]
Grown = tuple[Edges, bool]  # the edges, and whether the text may end here


class State:
    """A place in a grammar. `grow` computes its edges and finality, once, when they are needed."""

    __slots__ = ("_distance", "_grow", "_grown", "tokens")

    def __init__(self, grow: Callable[[], Grown] | None = None, grown: Grown | None = None) -> None:
        self._grow = grow
        self._grown = grown
        self._distance: int | None = None
        # What whole tokens do from here, filled by the tracker: tokens repeat, so do states.
        self.tokens: dict[bytes, tuple[State, Tag]] | None = None

    @property
    def grown(self) -> Grown:
        if self._grown is None:
            assert self._grow is not None
            self._grown, self._grow = self._grow(), None
        return self._grown

    @property
    def edges(self) -> Edges:
        """Legal byte -> edge."""
        return self.grown[0]

    @property
    def final(self) -> bool:
        """Whether the text may end here."""
        return self.grown[1]

    @property
    def forced(self) -> bool:
        """Whether exactly one byte is legal, and the end is not."""
        edges, final = self.grown
        return len(edges) == 1 and not final

    @property
    def critical(self) -> bool:
        """See `pask.structure.tags`."""
        return not self.forced and any(e.unit.role in CRITICAL_ROLES for e in self.edges.values())

    @property
    def distance(self) -> int:
        """Fewest bytes to a critical state; NEAR_BYTES + 1 for more, -1 where the text ends."""
        if self._distance is None:
            self._distance = self._measure()
        return self._distance

    @property
    def next(self) -> Next:
        distance = self.distance
        if distance == 0:
            return Next.CRITICAL
        if distance < 0:
            return Next.END
        return Next.NEAR if distance <= NEAR_BYTES else Next.FAR

    def _measure(self) -> int:
        """Along forced bytes the distance is the one ahead plus one, so a run is looked at once."""
        run: list[State] = []
        state = self
        while state._distance is None and state.forced:
            run.append(state)
            (edge,) = state.edges.values()
            state = edge.target
        if state._distance is None:
            state._distance = state._search()
        distance = state._distance
        for passed in reversed(run):
            if distance >= 0:
                distance = min(distance + 1, NEAR_BYTES + 1)
            passed._distance = distance
        return distance

    def _search(self) -> int:
        """Breadth first, from a state with a choice or an end."""
        seen, ring = {id(self)}, [self]
        for distance in range(NEAR_BYTES + 1):
            if any(state.critical for state in ring):
                return distance
            following = []
            for state in ring:
                for edge in state.edges.values():
                    if id(edge.target) not in seen:
                        seen.add(id(edge.target))
                        following.append(edge.target)
            ring = following
        return NEAR_BYTES + 1 if ring else -1


class TagGrammar:
    """A grammar that yields tags: its start state. Implementations build the states."""

    def __init__(self, start: State) -> None:
        self.start = start


END = State(grown=({}, True))


def text(data: bytes, unit: Unit, then: State, phase: int | None = None) -> State:
    """Exactly these bytes. `phase` for all of them, where position does not say it."""
    return then if not data else _Text(data, 0, unit, unit.rank, then, phase)


class _Text(State):
    """One byte of a fixed text; the state after it is made when the byte is looked at."""

    __slots__ = ("_all_phase", "_at", "_data", "_rank", "_then", "_unit")

    def __init__(
        self, data: bytes, at: int, unit: Unit, rank: int, then: State, phase: int | None
    ) -> None:
        # Not through State's own: there is a state for each byte of every key and name.
        self._grown = self._distance = self.tokens = None
        self._data, self._at, self._unit, self._rank = data, at, unit, rank
        self._then, self._all_phase = then, phase

    @property
    def grown(self) -> Grown:
        if self._grown is None:
            self._grown = {self._data[self._at]: self._edge()}, False
        return self._grown

    @property
    def forced(self) -> bool:
        return True

    def _edge(self) -> Edge:
        data, at, after, phase = self._data, self._at, self._at + 1, self._all_phase
        last = after == len(data)
        if phase is None:
            phase = (0 if at else OPENS) | (CLOSES if last else 0)
        unit, rank, then = self._unit, self._rank, self._then
        target = then if last else _Text(data, after, unit, rank, then, self._all_phase)
        return Edge(rank, phase, False, target, unit)


def byte_set(legal: Iterable[int], unit: Unit, then: State, phase: int = 0) -> Edges:
    """Any one of these bytes."""
    return dict.fromkeys(legal, Edge(unit.rank, phase, False, then, unit))


def union(states: Iterable[State]) -> State:
    """Any one of these continuations; told apart as late as their bytes allow."""
    distinct = list({id(state): state for state in states}.values())
    if len(distinct) == 1:
        return distinct[0]
    return State(lambda: joined([state.grown for state in distinct]))


def joined(parts: Iterable[Grown]) -> Grown:
    """The union of what several states do. Where they differ on a byte's unit, the most
    consequential one is taken; it opens or closes only if it does in every such reading."""
    edges: Edges = {}
    also: dict[int, list[Edge]] = {}
    final = False
    for part, ends in parts:
        final = final or ends
        for byte, edge in part.items():
            if byte in edges:
                also.setdefault(byte, [edges[byte]]).append(edge)
            else:
                edges[byte] = edge
    for byte, several in also.items():
        edges[byte] = _merged(several)
    return edges, final


def _merged(several: list[Edge]) -> Edge:
    best = min(several, key=lambda edge: edge.rank)
    phase, unit = OPENS | CLOSES, best.unit
    for edge in several:
        if edge.rank == best.rank:
            phase &= edge.phase
        if edge.unit is not unit:
            unit = _common(unit, edge.unit)
    target = union(edge.target for edge in several)
    return Edge(best.rank, phase, unit.role in CHOSEN_ROLES, target, unit)


@lru_cache(maxsize=4096)
def _common(unit: Unit, other: Unit) -> Unit:
    return unit._replace(path=common_path([unit.path, other.path]))


def common_path(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """What all paths begin with: what is decided whichever reading turns out to be right."""
    common = paths[0]
    while any(path[: len(common)] != common for path in paths):
        common = common[:-1]
    return common


def legal_bytes(edges: Mapping[int, Edge]) -> str:
    """The legal bytes as people read them, for messages."""
    shown = [chr(byte) if 32 < byte < 127 else f"0x{byte:02x}" for byte in sorted(edges)]
    return " ".join(shown[:12]) + (" ..." if len(shown) > 12 else "")
