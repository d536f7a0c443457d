"""The graph of states by itself: unions, forced runs and the distance to a critical state."""

from __future__ import annotations

from pask.structure.automaton import (
    CLOSES,
    END,
    OPENS,
    State,
    Unit,
    byte_set,
    joined,
    text,
    union,
)
from pask.structure.tags import NEAR_BYTES, Next, Role, TokenClass

KEY = Unit(TokenClass.KEY, Role.REQUIRED_KEY, ("f", "a"))
OTHER_KEY = Unit(TokenClass.KEY, Role.OPTIONAL_KEY, ("f", "b"))
VALUE = Unit(TokenClass.STRING, Role.REQUIRED_VALUE, ("f", "a"))
LAYOUT = Unit(TokenClass.SCAFFOLD, Role.LAYOUT)


def test_a_union_is_of_several_units_until_a_byte_tells_them_apart() -> None:
    both = union([text(b"ab", KEY, END), text(b"ac", OTHER_KEY, END)])
    (shared,) = both.edges.values()
    assert (shared.unit.role, shared.unit.path, shared.shared) == (KEY.role, ("f",), True)
    assert shared.phase == OPENS
    assert {byte: edge.unit for byte, edge in shared.target.edges.items()} == {
        ord("b"): KEY,
        ord("c"): OTHER_KEY,
    }


def test_only_readings_of_the_best_rank_say_whether_a_unit_opens_or_closes() -> None:
    inside = State(grown=(byte_set(b"x", VALUE, END), False))
    for weaker in (text(b"x", LAYOUT, END), text(b"xy", KEY, END)):
        (edge,) = union([inside, weaker]).edges.values()
        assert (edge.unit.role, edge.phase, edge.shared) == (VALUE.role, 0, False)
    (edge,) = union([text(b"1", VALUE, END), text(b"12", VALUE, END)]).edges.values()
    assert edge.phase == OPENS  # not closed: "12" goes on
    (edge,) = union([text(b"1", VALUE, END), text(b"1", VALUE, inside)]).edges.values()
    assert edge.phase == OPENS | CLOSES


def test_a_union_may_end_where_one_of_its_parts_may() -> None:
    assert union([END, text(b"x", VALUE, END)]).final
    assert not union([text(b"x", VALUE, END), text(b"y", VALUE, END)]).final
    assert union([END, END]) is END
    assert joined([END.grown]) == ({}, True)


def test_distances_are_counted_along_forced_bytes_to_the_next_choice() -> None:
    choice = union([text(b"x", VALUE, END), text(b"y", VALUE, END)])
    state = text(b"." * (NEAR_BYTES + 3), LAYOUT, choice)
    found = []
    while state is not choice:
        found.append((state.distance, state.next))
        (edge,) = state.edges.values()
        state = edge.target
    far, near = [(NEAR_BYTES + 1, Next.FAR)] * 3, range(NEAR_BYTES, 0, -1)
    assert found == [*far, *((distance, Next.NEAR) for distance in near)]
    assert (choice.distance, choice.next) == (0, Next.CRITICAL)


def test_a_choice_of_layout_is_not_critical() -> None:
    after = union([text(b"x", VALUE, END), text(b"y", VALUE, END)])
    blanks = State(lambda: joined([(byte_set(b" ", LAYOUT, blanks), False), after.grown]))
    assert blanks.next is Next.CRITICAL  # x or y decides here
    closing = State(lambda: joined([(byte_set(b" ", LAYOUT, closing), False), END.grown]))
    assert (closing.forced, closing.critical, closing.next) == (False, False, Next.END)
    before = State(lambda: joined([(byte_set(b" ", LAYOUT, before), False), step.grown]))
    step = text(b"->", LAYOUT, after)
    assert (before.distance, before.next) == (2, Next.NEAR)
