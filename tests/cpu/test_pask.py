"""PASK while it decodes: Algorithm 2 by hand, and a tiny random model under made-up policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from pask.errors import PaskError
from pask.methods.contract import (
    UNREACHABLE,
    Captures,
    Decoded,
    Placement,
    PromptInfo,
    RequestState,
    Wants,
)
from pask.methods.levels import Level
from pask.methods.pask import BELOW_FLOORS, PASK, RESERVES
from pask.methods.registry import make_method
from pask.policy.floors import Thresholds
from pask.structure.labels import Label
from pask.structure.tags import Tag
from tests.cpu.pask_policies import (
    FAR_TAG,
    NEAR_TAG,
    UNSEEN_TAG,
    VALUE_TAG,
    H,
    L,
    R,
    by_hand,
)
from tests.cpu.test_pask_plan import LABELS, info


def decided(state: RequestState, tags: Sequence[Tag]) -> list[tuple[Level, ...]]:
    return [tuple(state.level_of(Decoded(n, 7, b"x", tag))) for n, tag in enumerate(tags)]


def small(setting: float = 12 / 36, **fields: Any) -> PASK:
    """`by_hand` with what its groups need: one sink, a window of one."""
    return PASK(nominal=setting, recent=1, sinks=1, policy=by_hand(), **fields)


def test_tokens_are_looked_up_until_the_budget_is_spent() -> None:
    """R_0 = 3.75 (`test_pask_plan`); Gamma is 0.5 for values, 0.25 for layout. The six values of
    an answer take 1.875 at their floors, 4.625 as selected."""
    state = small().open(info(LABELS, 24))
    expected = [
        # tag, levels of the 3 layers, what is left
        (FAR_TAG, (R, R, R), 3.75),
        (VALUE_TAG, (L, H, H), 2.979167),  # critical, but 3.854 are to be left for the others
        (VALUE_TAG, (L, H, H), 2.208333),
        (VALUE_TAG, (L, H, H), 1.4375),
        (VALUE_TAG, (L, H, H), 0.666667),  # 0.9375 free
        (VALUE_TAG, (L, L, L), 0.354167),  # 0.3125 is kept for the last one: 0.3542, the floors
        (NEAR_TAG, (R, R, R), 0.354167),
        (UNSEEN_TAG, (H, H, H), -0.645833),  # never judged
        (VALUE_TAG, (L, L, L), -0.958333),  # nothing left: the floors stay
        (NEAR_TAG, (R, R, R), -0.958333),
    ]
    for at, (tag, levels, left) in enumerate(expected):
        assert decided(state, [tag]) == [levels], at
        assert vars(state)["_remaining"] == pytest.approx(left, abs=1e-6), at


def test_the_reserve_by_state_is_the_papers_rule() -> None:
    """Gamma alone bounds a promotion: the first values take all of R_0, the others their floors."""
    state = small(reserve="by_state").open(info(LABELS, 24))
    expected = [
        (FAR_TAG, (R, R, R), 3.75),
        (VALUE_TAG, (H, H, H), 2.75),  # 3.75 - 0.5
        (VALUE_TAG, (H, H, H), 1.75),
        (VALUE_TAG, (H, H, H), 0.75),  # 1.25
        (VALUE_TAG, (L, L, L), 0.4375),  # 0.25: the floors, which are more
        (NEAR_TAG, (L, R, R), 0.333333),  # 0.1875: 0.1042, a second group would be 0.3125
        (VALUE_TAG, (L, L, L), 0.020833),
        (VALUE_TAG, (L, L, L), -0.291667),
    ]
    for at, (tag, levels, left) in enumerate(expected):
        assert decided(state, [tag]) == [levels], at
        assert vars(state)["_remaining"] == pytest.approx(left, abs=1e-6), at


def test_a_long_answer_has_its_share_unless_by_state() -> None:
    """All of a prompt of user's words fits, and beside it the answer as selected: 4.625, by the
    mean, and half as much again where an answer of the quantile's length is that long."""
    policy = dataclasses.replace(by_hand(), margin=1.5)
    left = {
        reserve: vars(
            PASK(nominal=0.4, recent=1, sinks=1, policy=policy, reserve=reserve).open(
                info(LABELS, 24)
            )
        )["_remaining"]
        for reserve in RESERVES
    }
    assert left == {
        "by_state": pytest.approx(4.625),
        "counted_down": pytest.approx(4.625 * 1.5),
    }


def test_what_is_left_over_promotes_what_is_critical() -> None:
    """R_0 = 5.16 beside a whole prompt: 0.535 more than six values take as selected."""
    state = small(20.16 / 36).open(info(LABELS, 24))
    expected = [
        (FAR_TAG, (R, R, R), 5.16),
        (NEAR_TAG, (L, L, L), 4.8475),  # 0.535: a third layer or group at HIGH would be too much
        (VALUE_TAG, (L, H, H), 4.076667),  # 0.2225: its first layer takes 0.2292
        (VALUE_TAG, (L, H, H), 3.305833),
    ]
    for at, (tag, levels, left) in enumerate(expected):
        assert decided(state, [tag]) == [levels], at
        assert vars(state)["_remaining"] == pytest.approx(left, abs=1e-6), at


def test_what_a_request_remembers_does_not_grow() -> None:
    state = small(0.9).open(info(LABELS, 24))
    decided(state, [VALUE_TAG, FAR_TAG, NEAR_TAG, UNSEEN_TAG] * 10)
    before = dict(vars(state))
    decided(state, [VALUE_TAG, NEAR_TAG, FAR_TAG] * 300)
    after = vars(state)
    counted = {"_remaining", "_floors_ahead", "_selected_ahead"}
    assert {name for name in before if before[name] is not after[name]} == counted
    assert before.keys() == after.keys()
    assert all(isinstance(after[name], float) for name in counted)


def test_a_request_asks_for_nothing_and_declares_what_it_does() -> None:
    acting = small().open(info(LABELS, 24))
    assert (acting.wants, acting.evicts, acting.choice) == (Wants(), False, None)
    assert (acting.acts_on_tokens, acting.recent) == (True, 1)
    assert (acting.levels, acting.shifted_keys, acting.notes) == (frozenset({L}), True, ())
    assert small(0.27).open(info(LABELS, 24)).notes == (BELOW_FLOORS,)
    assert small(0.2).open(info(LABELS, 24)).notes == (UNREACHABLE, BELOW_FLOORS)
    by_distortion = small(0.27, prompt_path="distortion").open(info(LABELS, 24))
    assert by_distortion.notes == (UNREACHABLE,)
    at_high = small(0.6).open(info(LABELS, 0))
    assert not at_high.acts_on_tokens
    assert at_high.levels == {L}


def test_a_layer_is_placed_as_its_group() -> None:
    about = info(LABELS)
    state = small(0.97).open(about)  # H throughout, and H444HHHHHHHH from layer 1 on
    placed = [state.place(layer, Captures()) for layer in range(3)]
    for one in placed:
        one.check(about, state.levels)
    assert placed[0] == Placement()
    for one in placed[1:]:
        assert one.tokens is not None
        assert one.tokens[L].tolist() == [[1, 2, 3]] * 2
        assert one.tokens[H].tolist() == [[0, 4, 5, 6, 7, 8, 9, 10, 11]] * 2
    state = small(0.55).open(about)  # H....HH4444H, then H...4HH4444H
    first, second, _ = (state.place(layer, Captures()).tokens for layer in range(3))
    assert first is not None
    assert second is not None
    assert (first[L][0].tolist(), second[L][0].tolist()) == ([7, 8, 9, 10], [4, 7, 8, 9, 10])
    assert first[H][1].tolist() == second[H][1].tolist() == [0, 5, 6, 11]


# Parameters


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"recent": -1}, "pask: recent -1 is below 0"),
        ({"sinks": -2}, "pask: sinks -2 is below 0"),
        ({"ranking": "none"}, "pask: ranking 'none' is none of distortion, distortion_per_byte, "),
        ({"floors": "all"}, "pask: floors 'all' is none of task_error, none"),
        ({"reserve": "none"}, "pask: reserve 'none' is none of counted_down, by_state"),
        ({"share": "half"}, "pask: share 'half' is none of prompt_first, by_distortion"),
        ({"prompt_path": "loss"}, "pask: prompt_path 'loss' is none of harm_first, distortion"),
        ({"distortion": "all"}, "pask: distortion 'all' is none of local, propagated"),
        ({"positions": "few"}, "pask: positions 'few' is none of affected, all"),
        ({"stages": "prefill"}, "pask: stages 'prefill' is none of both, decode, prompt"),
        ({"alpha_decode": 5.0}, "pask: alpha_decode 5.0 is outside 0..1"),
        ({"alpha_prefill": -0.1}, "pask: alpha_prefill -0.1 is outside 0..1"),
        ({"beta": float("nan")}, "pask: beta nan is outside 0..1"),
        ({"actions": "L4,H"}, "pask: actions 'L4,H': .* begin with R"),
        ({"actions": "R,L5,H"}, "pask: actions 'R,L5,H': .*L5"),
        ({"tau": "1"}, "pask: tau '1' is not like"),
        ({"tau": "2/1"}, "pask: tau '2/1' is not like"),
        ({"tau": "0.5/1,"}, "pask: tau '0.5/1,' is not like"),
        ({"tau": "1/inf"}, "pask: tau '1/inf' is above 100"),
        ({"policy": by_hand(), "recent": 4}, "pask: recent is 4, the policy's 1"),
        (
            {"policy": by_hand(), "recent": 1, "actions": "R,H"},
            "pask: actions are R,H, the policy's R,L4,H",
        ),
    ],
)
def test_what_is_refused(fields: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PASK(**fields)


def test_a_config_with_a_bad_parameter_has_one_line() -> None:
    with pytest.raises(PaskError, match="pask: actions 'H,R'"):
        make_method("pask", 0.3, {"actions": "H,R"})
    found = make_method("pask", None, {"recent": 1}, measured={"policy": by_hand()})
    assert found == PASK(budget=0.33, recent=1, policy=by_hand())


def test_thresholds_are_proportions() -> None:
    assert PASK().thresholds == (
        Thresholds(0.005, 0.01),
        Thresholds(0.01, 0.02),
        Thresholds(0.02, 0.04),
    )


def test_what_a_request_cannot_do_without() -> None:
    with pytest.raises(ValueError, match="pask: needs its policy: run pask policy make"):
        PASK().open(info(LABELS))
    with pytest.raises(ValueError, match="labels, and the request has none"):
        small().open(info(None))
    with pytest.raises(ValueError, match="tags, and the request has no tag grammar"):
        small().open(info(LABELS, 24)).level_of(Decoded(0, 7, b"x", None))
    with pytest.raises(ValueError, match="the policy is for 3 layers, the model has 2"):
        small().open(dataclasses.replace(info(LABELS), layers=2))
    # A prompt that stays whole needs no labels, and everything needs nothing at all.
    assert small(0.9, stages="decode").open(info(None, 24)).acts_on_tokens
    assert not PASK(nominal=1.0).open(info(None)).levels


def test_two_requests_of_one_method_know_nothing_of_each_other() -> None:
    method = small()
    tags = [VALUE_TAG, NEAR_TAG, VALUE_TAG, UNSEEN_TAG, VALUE_TAG, FAR_TAG] * 2
    alone = decided(method.open(info(LABELS, 24)), tags)
    first, second = method.open(info(LABELS, 24)), method.open(info(LABELS, 24))
    both = [(decided(first, [tag])[0], decided(second, [tag])[0]) for tag in tags]
    assert both == [(levels, levels) for levels in alone]
    prompt = PromptInfo(40, 3, 2, 2, 32, 24, 1, (Label.USER,) * 40)
    placed = [method.open(prompt).place(1, Captures()).tokens for _ in range(2)]
    assert placed[0] is not None
    assert placed[1] is not None
    assert all(torch.equal(placed[0][level], placed[1][level]) for level in placed[0])
