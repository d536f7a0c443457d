"""Interventions on one bucket: exactly which tokens they touch, in which layers, at which level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pask.calibration.intervention import OneBucket, OneLabel, changeable
from pask.methods.contract import Captures, Decoded, Placement, PromptInfo
from pask.methods.levels import Level
from pask.structure.buckets import LayerBucket
from pask.structure.labels import Label
from pask.structure.tags import Choice, Next, Phase, Role, Tag, TokenClass

U, S, K = Label.USER, Label.TOOL_SCAFFOLD, Label.PARAMETER_KEY
LABELS = (S, U, S, U, K, U, S, S)
VALUE = Tag(TokenClass.STRING, Role.REQUIRED_VALUE, Phase.INSIDE, Choice.FREE, Next.CRITICAL)
EVERY = tuple(Level)


def info(labels: Sequence[Label] | None = LABELS, layers: int = 4) -> PromptInfo:
    return PromptInfo(len(labels or LABELS), layers, 2, 2, 32, labels=labels)


def placed(method: OneLabel, about: PromptInfo) -> list[dict[Level, list[list[int]]] | None]:
    """Each layer's placement, checked as the engine checks it, as plain lists."""
    state = method.open(about)
    found: list[dict[Level, list[list[int]]] | None] = []
    for layer in range(about.layers):
        answer: Placement = state.place(layer, Captures())
        answer.check(about, state.levels)
        tokens = answer.tokens
        found.append(None if tokens is None else {a: t.tolist() for a, t in tokens.items()})
    return found


def test_a_label_is_released_in_its_group_of_layers_alone() -> None:
    method = OneLabel(bucket=LayerBucket("user", 1), level=Level.RELEASE, sinks=2, groups=2)
    kept = {Level.HIGH: [[0, 1, 2, 4, 6, 7]] * 2}  # token 1 is the user's too, but a sink
    assert placed(method, info()) == [None, None, kept, kept]
    state = method.open(info())
    assert not state.acts_on_tokens
    assert state.levels == frozenset()


@pytest.mark.parametrize("level", [level for level in Level if level.is_low])
def test_a_label_at_a_low_level(level: Level) -> None:
    method = OneLabel(bucket=LayerBucket("user", 0), level=level, sinks=0, groups=(0, 1))
    expected = {Level.HIGH: [[0, 2, 4, 6, 7]] * 2, level: [[1, 3, 5]] * 2}
    assert placed(method, info()) == [expected, None, None, None]
    assert method.open(info()).levels == {level}


def test_the_first_four_tokens_and_the_last_stay() -> None:
    method = OneLabel(bucket=LayerBucket("user", 0), groups=1)
    assert placed(method, info(layers=1)) == [{Level.HIGH: [[0, 1, 2, 3, 4, 6, 7]] * 2}]
    whole = replace(method, bucket=LayerBucket("tool_scaffold", 0))
    assert placed(whole, info(layers=1)) == [{Level.HIGH: [[0, 1, 2, 3, 4, 5, 7]] * 2}]
    assert list(changeable(LABELS, 4)) == [4, 5, 6]
    assert list(changeable(LABELS[:4], 4)) == list(changeable(LABELS[:1], 4)) == []


@pytest.mark.parametrize(
    "method",
    [
        OneLabel(bucket=LayerBucket("enum", 0), groups=1),
        OneLabel(bucket=LayerBucket("parameter_key", 0), sinks=5, groups=1),
        OneLabel(bucket=LayerBucket("user", 0), sinks=99, groups=1),
        OneLabel(bucket=LayerBucket("user", 0), level=Level.HIGH, sinks=0, groups=1),
    ],
    ids=["a label that does not occur", "all of it sinks", "all sinks", "HIGH"],
)
def test_what_changes_nothing_keeps_every_layer_whole(method: OneLabel) -> None:
    assert placed(method, info()) == [None] * 4


@pytest.mark.parametrize("level", [Level.RELEASE, Level.LOW4])
def test_a_layer_never_ends_up_empty(level: Level) -> None:
    method = OneLabel(bucket=LayerBucket("user", 0), level=level, sinks=0, groups=1)
    low = {level: [[0, 1]] * 2} if level.is_low else {}
    assert placed(method, info((U, U, U), layers=1)) == [{Level.HIGH: [[2]] * 2} | low]
    assert placed(method, info((U,), layers=1)) == [None]


def test_labels_are_needed() -> None:
    with pytest.raises(ValueError, match="made of labels, and the request has none"):
        OneLabel(bucket=LayerBucket("user", 0)).open(info(None))
    with pytest.raises(ValueError, match=r"^one_label: -1 sinks"):
        OneLabel(sinks=-1)


def test_placements_are_what_the_contract_asks_for() -> None:
    state = OneLabel(bucket=LayerBucket("user", 0), level=Level.LOW8, groups=1).open(info())
    tokens = state.place(0, Captures()).tokens
    assert tokens is not None
    assert all(kept.dtype == torch.int64 and kept.shape[0] == 2 for kept in tokens.values())


@pytest.mark.parametrize("level", EVERY)
def test_decoded_tokens_of_one_bucket(level: Level) -> None:
    bucket = LayerBucket("required_value/free/critical", 1)
    state = OneBucket(bucket=bucket, level=level, recent=3, groups=(0, 1, 3)).open(info(None, 5))
    high = Level.HIGH
    mine = Decoded(0, 7, b"a", VALUE)
    assert list(state.level_of(mine)) == [high, level, level, high, high]
    for other in (
        VALUE._replace(choice=Choice.FORCED),
        VALUE._replace(next=Next.FAR),
        VALUE._replace(role=Role.ENUM),
    ):
        assert list(state.level_of(replace(mine, tag=other))) == [high] * 5
    assert state.recent == 3
    assert state.levels == ({level} if level.is_low else frozenset())
    assert all(state.place(layer, Captures()).tokens is None for layer in range(5))
    with pytest.raises(ValueError, match="no tag grammar"):
        state.level_of(replace(mine, tag=None))
