"""The decode-side tracker: fed with accepted tokens, it says each one's structural tag."""

from __future__ import annotations

from pask.structure.automaton import CLOSES, OPENS, State, TagGrammar, Unit, legal_bytes
from pask.structure.tags import CONSEQUENCE, Choice, Tag, tag


class IllegalBytes(ValueError):
    """The grammar does not allow these bytes here; the tracker stays where it was."""


class Tracker:
    """Where an answer stands in its grammar.

    Deterministic: equal bytes give equal states. A token costs about a microsecond in a state that
    has seen it, several where states are new (a hundred for a bracket in a free-form value); a fork
    or a rollback no more than copying or shortening a list of references.
    """

    __slots__ = ("_states",)

    def __init__(self, grammar: TagGrammar) -> None:
        self._states = [grammar.start]

    def accept(self, token: bytes) -> Tag:
        """Take the bytes of one token and give its tag.

        Raises IllegalBytes where the grammar does not allow them and ValueError for a token
        without bytes (a stop or control token is no part of the text); nothing changes then.
        """
        state = self._states[-1]
        seen = state.tokens
        if seen is None:
            seen = state.tokens = {}
        known = seen.get(token)
        if known is None:
            known = seen[token] = _walk(state, token)
        self._states.append(known[0])
        return known[1]

    def rollback(self, tokens: int = 1) -> None:
        """Take back the last so many tokens; ValueError where there are not so many."""
        if not 0 <= tokens < len(self._states):
            raise ValueError(f"cannot take back {tokens} of {len(self._states) - 1} tokens")
        if tokens:
            del self._states[-tokens:]

    def fork(self) -> Tracker:
        """An independent tracker at the same place, with the same past."""
        other = Tracker.__new__(Tracker)
        other._states = self._states.copy()
        return other

    @property
    def state(self) -> State:
        """The grammar's state after the last token: the paper's s_t."""
        return self._states[-1]

    @property
    def can_end(self) -> bool:
        """Whether the answer may end here."""
        return self.state.final

    @property
    def legal(self) -> frozenset[int]:
        """The bytes that may follow."""
        return frozenset(self.state.edges)

    @property
    def places(self) -> tuple[Unit, ...]:
        """What the next byte can be part of, most consequential first."""
        units = {edge.unit for edge in self.state.edges.values()}
        return tuple(sorted(units, key=lambda unit: (unit.rank, unit.path)))


def _walk(state: State, token: bytes) -> tuple[State, Tag]:
    if not isinstance(token, bytes):
        raise TypeError(f"a token is bytes, not {type(token).__name__}")
    if not token:
        raise ValueError("a token without bytes has no place in the grammar")
    best, phase, shared, free = len(CONSEQUENCE), 0, False, False
    for at, byte in enumerate(token):
        edges, final = state.grown
        edge = edges.get(byte)
        if edge is None:
            raise IllegalBytes(
                f"byte {at} of {token!r} is not legal here; legal: "
                f"{legal_bytes(edges) or 'nothing'}{' or the end' if final else ''}"
            )
        if final or len(edges) > 1:
            free = True
        if edge.rank < best:
            best, phase, shared = edge.rank, edge.phase, edge.shared
        elif edge.rank == best:
            phase |= edge.phase
            shared = edge.shared
        state = edge.target
    choice = Choice.FREE if free else Choice.SHARED if shared else Choice.FORCED
    return state, tag(best, bool(phase & OPENS), bool(phase & CLOSES), choice, state.next)
