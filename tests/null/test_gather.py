"""Sums over calibration rows, worked out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pask.calibration.gather import gather
from pask.errors import HarnessFault
from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.policy.evidence import Evidence, Failures
from pask.structure.buckets import LayerBucket

LADDER = Ladder.parse("R,L4,H")
R, L, H = Level.RELEASE, Level.LOW4, Level.HIGH


def outcome(
    side: str, bucket: str, level: str, correct: bool, positions: int = 2, propagated: float = 0.5
) -> dict[str, Any]:
    about = {"side": side, "bucket": bucket, "group": 0, "level": level, "correct": correct}
    felt = {"positions": positions, "propagated": propagated}
    return about | felt | {"tokens": 1, "changed": True, "token_layers": 9}


def distortion(side: str, bucket: str, level: str, positions: int, total: float) -> dict[str, Any]:
    about = {"side": side, "bucket": bucket, "group": 0, "level": level, "tokens": 1}
    return about | {"positions": positions, "total": total}


def line(
    correct: bool,
    names: list[str],
    labels: dict[str, int],
    outcomes: list[dict[str, Any]],
    distortions: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "reference_correct": correct,
        "fed": len(names),
        "replayed": len(names),
        "names": names,
        "labels": labels,
        "outcomes": outcomes,
        "distortions": distortions,
    }


LINES = [
    # Right; releasing `enum` loses it, and so does either change of the user's text.
    line(
        True,
        ["layout", "enum", "layout"],
        {"user": 6},
        [
            outcome("decode", "layout", "R", True),
            outcome("decode", "layout", "L4", True),
            outcome("decode", "enum", "R", False),
            outcome("decode", "enum", "L4", True),
            outcome("prompt", "user", "R", False),
            outcome("prompt", "user", "L4", False),
        ],
        [
            distortion("decode", "layout", "R", 2, 3.0),
            distortion("decode", "layout", "L4", 2, 0.5),
            distortion("decode", "enum", "R", 0, 0.0),
            distortion("decode", "enum", "L4", 0, 0.0),
            distortion("prompt", "user", "R", 3, 30.0),
            distortion("prompt", "user", "L4", 3, 6.0),
        ],
    ),
    # Wrong; releasing `layout` happens to mend it. There is no `enum`.
    line(
        False,
        ["layout"],
        {"user": 2, "type": 3},
        [
            outcome("decode", "layout", "R", True),
            outcome("decode", "layout", "L4", False),
            outcome("prompt", "user", "R", False),
            outcome("prompt", "user", "L4", True),
            outcome("prompt", "type", "R", False),
            outcome("prompt", "type", "L4", False),
        ],
        [
            distortion("decode", "layout", "R", 6, 5.0),
            distortion("decode", "layout", "L4", 6, 1.5),
            distortion("prompt", "user", "R", 1, 2.0),
            distortion("prompt", "user", "L4", 1, 0.0),
            distortion("prompt", "type", "R", 1, 0.25),
            distortion("prompt", "type", "L4", 1, 0.125),
        ],
    ),
    # Right, and has nothing of the answer's buckets: it counts all the same.
    line(True, [], {"user": 1}, [outcome("prompt", "user", "R", True),
                                 outcome("prompt", "user", "L4", True)], []),
    line(True, ["layout"], {}, [outcome("decode", "layout", "R", False),
                                outcome("decode", "layout", "L4", True)], []),
]  # fmt: skip


def gathered(lines: list[dict[str, Any]]) -> tuple[Evidence, Evidence]:
    return gather(lines, ladder=LADDER, groups=(4,), coarsening="role")


def test_both_sides_by_hand() -> None:
    decode, prompt = gathered(LINES)
    assert (decode.side, prompt.side) == ("decode", "prompt")
    assert decode.rows == prompt.rows == 4
    assert decode.ladder == prompt.ladder == LADDER
    assert decode.groups == prompt.groups == (4,)
    # The most consequential role first, whichever occurred first.
    enum, layout = decode.buckets
    assert (enum.bucket, layout.bucket) == (LayerBucket("enum", 0), LayerBucket("layout", 0))
    assert enum.tokens == 0.25
    assert enum.positions == 0
    assert enum.distortion == {R: 0.0, L: 0.0, H: 0.0}
    assert enum.failures == {R: Failures(4, 1, 0, 1), L: Failures(4, 0, 0, 1)}
    assert layout.tokens == 1.0
    assert layout.positions == 8
    assert layout.distortion == {R: 1.0, L: 0.25, H: 0.0}
    assert layout.failures == {R: Failures(4, 1, 1, 3), L: Failures(4, 0, 0, 3)}
    user, kind = prompt.buckets
    assert (user.bucket, kind.bucket) == (LayerBucket("user", 0), LayerBucket("type", 0))
    assert user.tokens == 2.25
    assert user.distortion == {R: 8.0, L: 1.5, H: 0.0}
    assert user.failures == {R: Failures(4, 1, 0, 3), L: Failures(4, 1, 1, 3)}
    assert kind.tokens == 0.75
    assert kind.distortion == {R: 0.25, L: 0.125, H: 0.0}
    assert kind.failures[R] == Failures(4, 0, 0, 1)
    assert [enum.failures[R].v, layout.failures[R].v, user.failures[L].v] == [0.25, 0.0, 0.0]


def test_readings_of_equation_4_by_hand() -> None:
    first = line(
        True,
        ["layout", "enum", "layout"],
        {},
        [
            outcome("decode", "layout", "R", True, 2, 3.0),
            outcome("decode", "layout", "L4", True, 2, 1.0),
            outcome("decode", "enum", "R", True, 1, 4.0),
            outcome("decode", "enum", "L4", True, 1, 0.0),
        ],
        [
            distortion("decode", "layout", "R", 2, 2.0),
            distortion("decode", "layout", "L4", 2, 0.5),
            distortion("decode", "enum", "R", 1, 3.0),
            distortion("decode", "enum", "L4", 1, 0.0),
        ],
    )
    # A wrong answer of five tokens, of which two were replayed.
    second = line(
        False,
        ["layout"] * 5,
        {},
        [
            outcome("decode", "layout", "R", False, 1, 6.0),
            outcome("decode", "layout", "L4", False, 1, 0.5),
        ],
        [
            distortion("decode", "layout", "R", 4, 10.0),
            distortion("decode", "layout", "L4", 4, 1.0),
        ],
    ) | {"replayed": 2}
    expected = {
        # enum at R, layout at R and L4, positions of each
        ("local", "affected"): (3 / 1, 12 / 6, 1.5 / 6, 1, 6),
        ("local", "all"): (3 / 8, 12 / 8, 1.5 / 8, 8, 8),
        ("propagated", "affected"): (4 / 1, 9 / 3, 1.5 / 3, 1, 3),
        ("propagated", "all"): (4 / 5, 9 / 5, 1.5 / 5, 5, 5),
    }
    for (reading, positions), numbers in expected.items():
        decode, _ = gather(
            [first, second],
            ladder=LADDER,
            groups=(4,),
            coarsening="role",
            distortion=reading,
            positions=positions,
        )
        enum, layout = decode.buckets
        assert (
            enum.distortion[R],
            layout.distortion[R],
            layout.distortion[L],
            enum.positions,
            layout.positions,
        ) == numbers


def test_the_order_of_rows_does_not_matter() -> None:
    assert gathered(LINES[::-1]) == gathered(LINES)


def test_groups_are_apart() -> None:
    second = copy.deepcopy(LINES[1])
    for record in second["outcomes"] + second["distortions"]:
        record["group"] = 1
    for record in second["outcomes"]:
        record["correct"] = False
    both = copy.deepcopy(LINES[1])
    both["outcomes"] += second["outcomes"]
    both["distortions"] += [one | {"total": 10 * one["total"]} for one in second["distortions"]]
    decode, _ = gather([both], ladder=LADDER, groups=(3, 1), coarsening="role")
    first, other = decode.buckets
    assert (first.bucket, other.bucket) == (LayerBucket("layout", 0), LayerBucket("layout", 1))
    assert (first.distortion[L], other.distortion[L]) == (0.25, 2.5)
    assert (first.failures[R].gained, other.failures[R].gained) == (1, 0)
    assert first.tokens == other.tokens == 1.0


def test_a_longer_ladder() -> None:
    ladder = Ladder.parse("R,L2,H")
    lines = [
        line(
            True,
            ["layout"],
            {},
            [outcome("decode", "layout", "R", False), outcome("decode", "layout", "L2", False)],
            [],
        )
    ]
    decode, prompt = gather(lines, ladder=ladder, groups=(1,), coarsening="role")
    assert decode.buckets[0].failures[Level.LOW2] == Failures(1, 1, 0, 1)
    assert prompt.buckets == ()


def test_rows_that_lack_an_outcome_are_a_fault() -> None:
    with pytest.raises(HarnessFault, match="no calibration row was measured"):
        gathered([])
    with pytest.raises(HarnessFault, match="enum, group 0: 0 rows have an outcome at L2, 1"):
        gather(LINES, ladder=Ladder.parse("R,L2,H"), groups=(4,), coarsening="role")
    with pytest.raises(HarnessFault, match=r"enum, group 1: 0 rows have an outcome at R"):
        gather(LINES, ladder=LADDER, groups=(2, 2), coarsening="role")
    with pytest.raises(HarnessFault, match="measured by another coarsening: enum"):
        gather(LINES, ladder=LADDER, groups=(4,), coarsening="role_choice")
    fewer = copy.deepcopy(LINES)
    del fewer[3]["outcomes"][0]
    with pytest.raises(HarnessFault, match="layout, group 0: 2 rows have an outcome at R, 3"):
        gathered(fewer)
