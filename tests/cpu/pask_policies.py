"""Policies for the tests of PASK: one small enough to follow by hand, and made-up ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.policy.evidence import BucketEvidence, Evidence, Failures
from pask.policy.path import Upgrade, greedy_path
from pask.policy.policy import Policy, SidePolicy
from pask.structure.buckets import LayerBucket
from pask.structure.tags import Choice, Next, Phase, Role, Tag, TokenClass

R, L, H = Level.RELEASE, Level.LOW4, Level.HIGH
VALUE, LAYOUT = "required_value/free/critical", "layout/forced/not_critical"

VALUE_TAG = Tag(TokenClass.STRING, Role.REQUIRED_VALUE, Phase.INSIDE, Choice.FREE, Next.CRITICAL)
FAR_TAG = Tag(TokenClass.SCAFFOLD, Role.LAYOUT, Phase.INSIDE, Choice.FORCED, Next.FAR)
NEAR_TAG = FAR_TAG._replace(next=Next.NEAR)
UNSEEN_TAG = FAR_TAG._replace(choice=Choice.FREE)


def evidence(
    side: str,
    groups: tuple[int, ...],
    buckets: Mapping[LayerBucket, tuple[float, Sequence[float]]],
    ladder: str = "R,L4,H",
) -> Evidence:
    """`buckets`: tokens a row and D at each level below HIGH, by bucket."""
    levels = Ladder.parse(ladder)
    return Evidence(
        side,
        levels,
        groups,
        10,
        tuple(
            BucketEvidence(
                bucket,
                tokens,
                dict(zip(levels.actions, (*distortion, 0.0), strict=True)),
                {level: Failures(10, 0, 0, 0) for level in levels.actions[:-1]},
                5,
            )
            for bucket, (tokens, distortion) in buckets.items()
        ),
    )


def _path(steps: Sequence[tuple[str, int, Level, Level]]) -> tuple[Upgrade, ...]:
    return tuple(
        Upgrade(LayerBucket(name, group), start, end, 0.0) for name, group, start, end in steps
    )


def by_hand() -> Policy:
    """3 layers in groups of 1 and 2; labels `user` and `function_name`, two buckets of tags."""
    prompt = {
        LayerBucket("function_name", 0): (4.0, (3.0, 1.0)),
        LayerBucket("function_name", 1): (4.0, (3.0, 1.0)),
        LayerBucket("user", 0): (4.0, (3.0, 1.0)),
        LayerBucket("user", 1): (4.0, (3.0, 1.0)),
    }
    # rho_D of VALUE: group 0 L->H 1.1 / (11/48) = 4.8, group 1 L->H 4.4 / (22/48) = 9.6; of LAYOUT:
    # group 0 R->L 0.5 / (5/48) = 4.8, L->H 0.1 / (11/48), group 1 R->L 2 / (10/48) = 9.6, L->H 0.2
    decode = {
        LayerBucket(VALUE, 0): (1.0, (9.0, 1.1)),
        LayerBucket(VALUE, 1): (1.0, (9.0, 4.4)),
        LayerBucket(LAYOUT, 0): (3.0, (0.6, 0.1)),
        LayerBucket(LAYOUT, 1): (3.0, (2.2, 0.2)),
    }
    prompt_path = [
        ("function_name", 1, R, L),
        ("user", 0, L, H),
        ("user", 1, L, H),
        ("function_name", 0, R, L),
        ("function_name", 0, L, H),
        ("function_name", 1, L, H),
    ]
    decode_path = [
        (VALUE, 1, L, H),
        (LAYOUT, 1, R, L),
        (VALUE, 0, L, H),
        (LAYOUT, 0, R, L),
        (LAYOUT, 1, L, H),
        (LAYOUT, 0, L, H),
    ]
    floors = {"user": L, "function_name": R, VALUE: L, LAYOUT: R}
    sides = [
        SidePolicy(
            evidence(side, (1, 2), buckets),
            None,
            "distortion",
            {bucket: floors[bucket.name] for bucket in buckets},
            _path(path),
            steps,
            (),
            0.05,
        )
        for side, buckets, path, steps in (
            ("decode", decode, decode_path, 1),
            ("prompt", prompt, prompt_path, 3),
        )
    ]
    reserve = {VALUE: 0.5, LAYOUT: 0.25}
    return Policy({}, 3, (0, 1), "role_choice_next", 1, 0.9, sides[0], sides[1], reserve, 1.0)


def made_up(
    seed: int,
    tags: Sequence[str],
    labels: Sequence[str],
    groups: tuple[int, ...],
    *,
    recent: int = 1,
    ladder: str = "R,L4,H",
) -> Policy:
    """Any evidence, any floors, and the greedy path from there."""
    draw = random.Random(seed)
    levels = Ladder.parse(ladder).actions

    def side(name: str, names: Sequence[str]) -> SidePolicy:
        tokens = {one: 8 * draw.random() for one in names}
        found = evidence(
            name,
            groups,
            {
                LayerBucket(one, group): (
                    tokens[one],
                    sorted((draw.random() for _ in levels[:-1]), reverse=True),
                )
                for one, group in itertools.product(names, range(len(groups)))
            },
            ladder,
        )
        floors = {one.bucket: draw.choice(levels[:-1]) for one in found.buckets}
        path = greedy_path(found, floors)
        steps = draw.randrange(len(path) // 2 + 1)
        return SidePolicy(found, None, "distortion", floors, path, steps, (), 0.05)

    reserve = {name: 3 * draw.random() for name in tags}
    starts = tuple(sum(groups[:n]) for n in range(len(groups)))
    decode, prompt = side("decode", tags), side("prompt", labels)
    margin = 1 + draw.random() / 2
    return Policy(
        *({}, sum(groups), starts, "role_choice_next", recent, 0.9),
        *(decode, prompt, reserve, margin),
    )
