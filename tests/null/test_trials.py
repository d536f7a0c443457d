"""Which candidates are tried, on evidence small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pask.calibration.trials import Nested, distinct, nested_families, spread, table_key
from pask.methods.levels import Level
from pask.methods.pask import PASK
from pask.policy.actions import Ladder
from pask.policy.floors import Thresholds
from pask.policy.path import Upgrade
from pask.structure.buckets import LayerBucket
from tests.null.policy_tables import L4, H, R, evidence, found

# 200 rows. V(R) is 0 of `a`, 3 % of `b`, 0.5 % of `c`; at L4 nothing is lost.
# rho_D, in one group of all layers (m: R 0, L4 5/16, H 1): of `a` 19.2 and 0, of `b` 25.6 and 4.8,
# of `c` 6.4 and 16.
TABLE = evidence(
    found("a", 0, {R: 6.0, L4: 0.0}, tokens=2.0),
    found("b", 0, {R: 11.3, L4: 3.3}, {R: 6}, tokens=1.0),
    found("c", 0, {R: 13.0, L4: 11.0}, {R: 1}, tokens=5.0),
)
TAU = "0.4/1,0.5/1,4/4"
SHORT = {R: ".", L4: "l", H: "H"}


def families(**fields: Any) -> list[Nested]:
    return nested_families(PASK(**{"tau": TAU, "candidates": 99, **fields}), TABLE)


def shown(table: Mapping[LayerBucket, Level]) -> str:
    """The levels of a, b and c, a character each."""
    return "".join(SHORT[table[LayerBucket(name, 0)]] for name in "abc")


def tables(family: Nested) -> list[str]:
    return [shown(table) for table in family.tables.values()]


def test_every_pair_of_thresholds_has_its_floors_and_its_path() -> None:
    found = families()
    assert [family.tau for family in found] == [
        Thresholds(0.004, 0.01),
        Thresholds(0.005, 0.01),
        Thresholds(0.04, 0.04),
    ]
    # An increase of exactly tau, c's under the second pair, is allowed.
    assert [shown(family.floors) for family in found] == [".ll", ".l.", "..."]
    assert [tables(family) for family in found] == [
        [".ll", "lll", "llH", "lHH", "HHH"],
        [".l.", "ll.", "lll", "llH", "lHH", "HHH"],
        ["...", ".l.", "ll.", "lll", "llH", "lHH", "HHH"],
    ]
    assert [up.ratio for up in found[0].path] == pytest.approx([19.2, 16.0, 4.8, 0.0])
    assert [family.tried for family in found] == [tuple(range(n)) for n in (5, 6, 7)]


def test_without_floors_there_is_one_family_from_everything_released() -> None:
    (found,) = families(floors="none")
    assert found.tau is None
    assert tables(found) == ["...", ".l.", "ll.", "lll", "llH", "lHH", "HHH"]


def test_without_ranking_buckets_take_turns() -> None:
    found = families(ranking="round_robin")
    assert tables(found[0]) == [".ll", "lll", "lHl", "lHH", "HHH"]
    assert tables(found[2]) == ["...", "l..", "ll.", "lll", "Hll", "HHl", "HHH"]
    assert [family.tau for family in found] == [family.tau for family in families()]


def test_fewer_candidates_are_those_nearest_to_equal_distances_of_cost() -> None:
    # Costs of 8 tokens: 1.875, 2.5, 5.9375, 6.625, 8; half way is 4.9375.
    found = families(candidates=3)[0]
    assert found.tried == (0, 2, 4)
    assert tables(found) == [".ll", "llH", "HHH"]
    assert list(found.tables) == [0, 2, 4]
    assert families(candidates=2)[0].tried == (0, 4)


# Which numbers of upgrades are tried: five buckets, 1, 1, 2, 4 and 8 of 16 tokens, go from R to H
# in this order. Costs are 0, 1, 2, 4, 8 and 16 of 16.
WHOLE = Ladder((R, H))
STEPS = evidence(
    *(found(name, 0, {R: 1.0}, tokens=n) for name, n in zip("abcde", (1, 1, 2, 4, 8), strict=True)),
    ladder=WHOLE,
)
PATH = tuple(Upgrade(each.bucket, R, H, 0.0) for each in STEPS.buckets)


@pytest.mark.parametrize(
    ("count", "tried"),
    [
        (2, (0, 5)),
        (3, (0, 4, 5)),  # 0, 8, 16
        (4, (0, 3, 4, 5)),  # 5.3 is nearest to 4, and 10.7 to 8
        (5, (0, 3, 4, 5)),  # 12 is as near to 8 as to 16: fewer upgrades
        (9, (0, 2, 3, 4, 5)),  # 2, 4, 6, 8, ... of 16: several have one nearest
        (17, (0, 1, 2, 3, 4, 5)),
        (500, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_both_ends_and_what_is_nearest_to_equal_distances(count: int, tried: Sequence[int]) -> None:
    least = dict.fromkeys((each.bucket for each in STEPS.buckets), R)
    assert spread(STEPS, least, PATH, count) == tried


def test_distances_are_from_the_floors_to_everything() -> None:
    """With `e` at H from the start costs are 8, 9, 10, 12 and 16; half way is 12, not 8."""
    least = {each.bucket: H if each.bucket.name == "e" else R for each in STEPS.buckets}
    assert spread(STEPS, least, PATH[:4], 3) == (0, 3, 4)


def test_floors_that_leave_nothing_to_upgrade() -> None:
    assert spread(STEPS, dict.fromkeys((q.bucket for q in STEPS.buckets), H), (), 12) == (0,)


def test_a_path_has_two_ends() -> None:
    with pytest.raises(ValueError, match="candidates: 1 of a path"):
        spread(STEPS, {}, PATH, 1)


# Keys


def test_equal_tables_of_several_families_are_tried_once() -> None:
    found = distinct(families())
    assert sorted(shown(table) for _, table in found.values()) == sorted(
        [".ll", "lll", "llH", "lHH", "HHH", ".l.", "ll.", "..."]
    )
    assert {side for side, _ in found.values()} == {"decode"}
    for key, (side, table) in found.items():
        assert key == table_key(side, table)
    again = distinct(reversed(families(tau="4/4,0.4/1,0.5/1")))
    assert again == found


def test_the_sides_have_keys_of_their_own() -> None:
    both = families()
    prompt = nested_families(PASK(tau=TAU, candidates=99), replace(TABLE, side="prompt"))
    assert len(distinct([*both, *prompt])) == 2 * 8


def test_a_key_is_what_lies_below_high() -> None:
    a, b = LayerBucket("a", 0), LayerBucket("b", 1)
    key = table_key("decode", {a: R, b: L4})
    assert key == table_key("decode", {LayerBucket("c", 0): H, b: L4, a: R})
    others: list[dict[LayerBucket, Level]] = [
        {a: R},
        {a: L4, b: R},
        {a: R, LayerBucket("b", 0): L4},
        {a: R, LayerBucket("c", 1): L4},
        {},
    ]
    keys = {table_key("decode", table) for table in others}
    assert len(keys) == 5
    assert key not in keys
