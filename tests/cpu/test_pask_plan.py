"""What a request's bytes buy under a policy: worked by hand, and against a literal second way."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pask.methods.contract import PromptInfo
from pask.methods.levels import Level
from pask.methods.pask_plan import DecodeChain, Plan, PromptChain, plan
from pask.policy.evidence import Evidence, Failures
from pask.policy.floors import Thresholds
from pask.policy.path import Upgrade, greedy_path
from pask.policy.policy import Policy
from pask.structure.buckets import LayerBucket
from pask.structure.labels import Label
from tests.cpu.pask_policies import H, L, R, by_hand, made_up

LABELS = (
    Label.CHAT_SCAFFOLD,
    *[Label.FUNCTION_NAME] * 4,
    *[Label.TYPE] * 2,  # calibration did not see it
    *[Label.USER] * 4,
    Label.CHAT_SCAFFOLD,
)
SHORT = {0: ".", 2: "2", 4: "4", 8: "8", 16: "H"}


def info(labels: tuple[Label, ...] | None, expected: int = 0, page: int = 1) -> PromptInfo:
    return PromptInfo(12 if labels is None else len(labels), 3, 2, 2, 32, expected, page, labels)


def planned(
    policy: Policy,
    about: PromptInfo,
    setting: float,
    stages: str = "both",
    sinks: int = 1,
    *,
    letter: bool = False,
    prompt_first: bool = True,
) -> Plan:
    assert policy.prompt is not None
    prompt = PromptChain.from_floors(policy.prompt) if letter else PromptChain.of(policy.prompt)
    chain = DecodeChain.of(policy.decode, prompt_first=prompt_first)
    if stages == "prompt":
        chain = DecodeChain.left_alone(policy.decode.evidence)
    return plan(
        about,
        setting,
        chain,
        None if stages == "decode" else prompt,
        policy.decode.evidence,
        recent=policy.recent,
        sinks=sinks,
        margin=policy.margin,
    )


def shown(found: Plan, prompt: int = 12, groups: int = 2) -> list[str]:
    """A character a token, a text a layer group."""
    if found.prompt is None:
        return ["H" * prompt] * groups
    return ["".join(SHORT[level] for level in row) for row in found.prompt.tolist()]


# By hand: 12 slots are everything. At HIGH anyway: token 0 (a sink), 5 and 6 (not seen), 11 (the
# last), 4 slots. At the floors the user's 4 tokens take 1.25, and the statistics of keys 1: 6.25.
# The upgrades cost, a token: 0.2083, 0.2292, 0.4583, 0.1042, 0.2292, 0.4583.


@pytest.mark.parametrize(
    ("setting", "first_layer", "others"),
    [
        (0.53, "H....HH4444H", "H....HH4444H"),  # 6.36
        (0.55, "H....HH4444H", "H...4HH4444H"),  # 6.60: 6.458, two would take 6.667
        (0.60, "H....HH4444H", "H4444HH4444H"),  # 7.20: 7.083, and 7.313 with the next
        (0.66, "H....HH4HHHH", "H4444HH4444H"),  # 7.92: 7.771, and 8 with a fourth
        (0.82, "H....HHHHHHH", "H4444HHHHHHH"),  # 9.84: 9.833, the selected candidate
        (0.95, "HHHHHHHHHHHH", "H4444HHHHHHH"),  # 11.40: 11.167
        (0.97, "HHHHHHHHHHHH", "H444HHHHHHHH"),  # 11.64: 11.625
    ],
)
def test_the_prompt_goes_up_its_path(setting: float, first_layer: str, others: str) -> None:
    found = planned(by_hand(), info(LABELS), setting)
    assert shown(found) == [first_layer, others]
    assert not found.unreachable
    assert found.steps is None  # no answer is expected, so none pays for a ring


# Below the floors: nothing has harmed a row here, so the user's INT4 goes by D, which is the same
# in both groups: the smaller upgrade, of the first layer, is kept longer. 4 slots stay, and 1.


@pytest.mark.parametrize(
    ("setting", "first_layer", "others", "unreachable"),
    [
        (0.05, "H....HH....H", "H....HH....H", True),
        (0.34, "H....HH....H", "H....HH....H", False),  # 4.08: no statistics of keys
        (0.45, "H....HH.444H", "H....HH....H", False),  # 5.40: 5 + 4 * 0.1042 is too much
        (0.46, "H....HH4444H", "H....HH....H", False),
        (0.50, "H....HH4444H", "H....HH..44H", False),  # 6.00: 5.417 + 2 * 0.2083
        (0.52, "H....HH4444H", "H....HH.444H", False),
    ],
)
def test_where_not_even_the_floors_fit_some_of_them_are_left(
    setting: float, first_layer: str, others: str, unreachable: bool
) -> None:
    found = planned(by_hand(), info(LABELS), setting)
    assert shown(found) == [first_layer, others]
    assert (found.unreachable, found.below_floors) == (unreachable, True)
    found = planned(by_hand(), info(LABELS), setting, letter=True)
    assert shown(found) == ["H....HH4444H", "H....HH4444H"]
    assert (found.unreachable, found.below_floors) == (True, False)


def test_above_the_floors_harm_comes_first_or_distortion() -> None:
    """Released, the function names lost one row of ten, which the thresholds allow, and the user's
    words five; those at INT4 lost none, and distort more."""
    policy = by_hand()
    assert policy.prompt is not None
    lost = {"user": 5, "function_name": 1}
    distortion = {"user": {R: 3.0, L: 2.9, H: 0.0}, "function_name": {R: 0.2, L: 0.1, H: 0.0}}
    evidence = replace(
        policy.prompt.evidence,
        buckets=tuple(
            replace(
                found,
                distortion=distortion[found.bucket.name],
                failures={
                    R: Failures(10, lost[found.bucket.name], 0, 5),
                    L: Failures(10, 0, 0, 5),
                },
            )
            for found in policy.prompt.evidence.buckets
        ),
    )
    path = greedy_path(evidence, policy.prompt.floors)
    side = replace(policy.prompt, evidence=evidence, tau=Thresholds(0.2, 0.2), path=path, steps=0)
    policy = replace(policy, prompt=side)
    # 7.20: 6.25 at the floors. A name to INT4 is 0.1042 in one layer and 0.2083 in two, a word to
    # HIGH 0.2292 and 0.4583.
    assert shown(planned(policy, info(LABELS), 0.6)) == ["H4444HH4444H", "H..44HH4444H"]
    found = planned(policy, info(LABELS), 0.6, letter=True)
    assert shown(found) == ["H....HHHHHHH", "H....HH4444H"]


# With 24 new tokens: 6 values and 18 of layout. As selected they take 6 (1/3 5/16 + 2/3) = 4.625,
# at their floors 6 5/16 = 1.875; the ring of 2 recent tokens 2, the statistics 1. 36 is everything.


def test_below_the_selected_candidate_the_answer_has_what_the_floors_leave() -> None:
    about = info(LABELS, 24)
    found = planned(by_hand(), about, 12 / 36)
    assert shown(found) == ["H....HH4444H"] * 2
    assert (found.steps, found.unreachable) == (1, False)
    assert found.remaining == pytest.approx(12 - 5.25 - 3)
    assert not found.below_floors
    # 10.125 is the least at the floors, 8.875 with nothing of the user's.
    found = planned(by_hand(), about, 10.1 / 36)
    assert (found.steps, found.unreachable, found.below_floors) == (1, False, True)
    assert found.remaining == pytest.approx(10.1 - 8 - 1 / 24)
    found = planned(by_hand(), about, 8.8 / 36)
    assert (found.steps, found.unreachable, found.below_floors) == (1, True, True)
    assert found.remaining == pytest.approx(1.8)


def test_then_the_prompt_goes_up_beside_the_selected_candidate() -> None:
    found = planned(by_hand(), info(LABELS, 24), 0.4)  # 14.4
    # 5.25 + 4 * 0.2083 + 3 * 0.2292 = 6.7708 for the prompt; a fourth would leave 4.4, not 4.625.
    # What is left of 14.4, 0.0042, is nobody's.
    assert shown(found) == ["H....HH4HHHH", "H4444HH4444H"]
    assert (found.steps, found.unreachable) == (1, False)
    assert found.remaining == pytest.approx(4.625)


@pytest.mark.parametrize(
    ("total", "steps", "remaining"),
    [
        (20.16, 1, 20.16 - 15),  # 12 for the prompt, and 3
        (23.37, 1, 23.37 - 15),
        (23.38, 2, 23.38 - 15),  # 18 tokens of layout at INT4 in two layers: 3.75 more, 23.375
        (24.76, 3, 24.76 - 15),
        (34.20, 5, 34.2 - 12 - 1 - 2 / 3),  # all at HIGH in the upper group: no ring there
    ],
)
def test_with_a_whole_prompt_the_answer_goes_up(total: float, steps: int, remaining: float) -> None:
    for stages in ("both", "decode"):
        labels = LABELS if stages == "both" else None  # nothing is asked of a prompt that stays
        found = planned(by_hand(), info(labels, 24), total / 36, stages)
        assert (found.prompt, found.steps, found.unreachable) == (None, steps, False)
        assert found.remaining == pytest.approx(remaining)


@pytest.mark.parametrize(
    ("total", "steps", "remaining", "others"),
    [
        (16.62, 1, 4.625, "H....HH4444H"),
        (16.63, 2, 4.625 + 3.75, "H....HH4444H"),  # layout to INT4 in two layers
        (18.01, 3, 9.75, "H....HH4444H"),  # values to HIGH in one: 6 * 0.2292 more
        (18.22, 3, 9.75, "H...4HH4444H"),  # names to INT4 in two layers: 0.2083 each
        (18.84, 3, 9.75, "H4444HH4444H"),
        (20.71, 4, 11.625, "H4444HH4444H"),  # layout to INT4 in the other layer: 6 * 0.3125
    ],
)
def test_answer_and_prompt_go_up_side_by_side_by_what_they_are_worth(
    total: float, steps: int, remaining: float, others: str
) -> None:
    """Half of D, as five of ten rows' positions feel a bucket, by slots: of the answer 2 / 0.625
    and then 1.1 / 0.2292 and 0.5 / 0.3125; of the prompt 2 / 0.8333 and then 1 / 0.9167."""
    found = planned(by_hand(), info(LABELS, 24), total / 36, prompt_first=False)
    assert shown(found) == ["H....HH4444H", others]
    assert (found.steps, found.unreachable) == (steps, False)
    assert found.remaining == pytest.approx(remaining)


def test_an_answer_that_does_not_pay_for_its_ring_stays_at_high() -> None:
    # The floors save 0.9219 a token: 1.84 of 2, 2.77 of 3; the ring takes 2.
    assert planned(by_hand(), info(LABELS, 2), 0.6).steps is None
    assert planned(by_hand(), info(LABELS, 3), 0.6).steps == 1
    # As selected 0.8073 a token: 1.61 of 2, 2.42 of 3. With pages of 16 the ring takes 16.
    assert planned(by_hand(), info(LABELS, 17, page=16), 0.9).steps is None
    assert planned(by_hand(), info(LABELS, 24), 0.6, "prompt").steps is None


def test_whole_pages_count() -> None:
    # 12 prompt tokens and 4 new ones are one page. Any low level takes a page of 5 and 1 more, and
    # HIGH a page nevertheless: nothing is less than everything.
    found = planned(by_hand(), info(LABELS, 4, page=16), 0.3)
    assert (found.prompt, found.steps, found.unreachable) == (None, None, True)


def test_a_prompt_side_needs_labels() -> None:
    with pytest.raises(ValueError, match="pask: the prompt side needs a prompt's labels"):
        planned(by_hand(), info(None, 24), 0.5)


# Against a second way: the chain walked token by token, its bytes counted from what is there.

COSTS = {Level.RELEASE: 0.0, Level.LOW2: 3 / 16, Level.LOW4: 5 / 16, Level.HIGH: 1.0}


def spared(evidence: Evidence, upgrade: Upgrade) -> float:
    """Distortion over an answer's positions that a slot spares, a mean calibration row's."""
    one = next(found for found in evidence.buckets if found.bucket == upgrade.bucket)
    less = one.distortion[upgrade.start] - one.distortion[upgrade.end]
    share = evidence.groups[one.bucket.group] / sum(evidence.groups)
    slots = one.tokens * (COSTS[upgrade.end] - COSTS[upgrade.start]) * share
    return max(0.0, less) * one.positions / evidence.rows / slots


def slow_chain(
    policy: Policy, about: PromptInfo, sinks: int, letter: bool, prompt_first: bool
) -> list[tuple[float, list[list[Level]], bool, float, bool]]:
    """(slots, levels by group and token, whether decoded tokens are acted on, their own slots,
    whether the answer has its floors alone)."""
    assert policy.prompt is not None
    assert about.labels is not None
    sizes, last = policy.decode.evidence.groups, about.prompt_tokens - 1
    ring = math.ceil((policy.recent + 1) / about.page_slots) * about.page_slots
    expected, everything = (
        about.expected_new_tokens,
        sum(one.tokens for one in policy.decode.evidence.buckets if one.bucket.group == 0),
    )

    def answer(
        table: dict[LayerBucket, Level] | None,
    ) -> tuple[list[dict[Level, float]], float, float]:
        """By group how many tokens at which level; their slots, and those of the ring."""
        if table is None:
            return [{Level.HIGH: expected} for _ in sizes], expected, 0.0
        spread: list[dict[Level, float]] = [defaultdict(float) for _ in sizes]
        for one in policy.decode.evidence.buckets:
            spread[one.bucket.group][table[one.bucket]] += one.tokens / everything * expected
        slots, rings = 0.0, 0.0
        for size, found in zip(sizes, spread, strict=True):
            slots += size / sum(sizes) * sum(COSTS[a] * n for a, n in found.items())
            rings += size / sum(sizes) * ring * any(n and a < Level.HIGH for a, n in found.items())
        return spread, slots, rings

    def count(prompt: list[list[Level]], table: dict[LayerBucket, Level] | None) -> float:
        spread, _, total = answer(table)
        low = table is not None and len(policy.decode.evidence.ladder.actions) > 2
        for size, levels, decoded in zip(sizes, prompt, spread, strict=True):
            for level in set(levels) | set(decoded):
                slots = levels.count(level) + decoded.get(level, 0)
                pages = math.ceil(round(slots / about.page_slots, 6)) * about.page_slots
                total += size / sum(sizes) * COSTS[level] * pages
                low = low or (level in levels and level.is_low)
        return total + low

    def paid(table: dict[LayerBucket, Level]) -> dict[LayerBucket, Level] | None:
        _, slots, rings = answer(table)
        return table if expected - slots > rings + 1e-9 else None

    decode = policy.decode
    tables: list[dict[LayerBucket, Level]] = [dict(decode.floors)]
    for upgrade in decode.path:
        tables.append({**tables[-1], upgrade.bucket: upgrade.end})
    selected = tables[decode.steps]
    later = [
        (table, spared(decode.evidence, upgrade))
        for table, upgrade in zip(
            tables[decode.steps + 1 :], decode.path[decode.steps :], strict=True
        )
        if paid(table)
    ]
    prompt = [[Level.HIGH] * about.prompt_tokens for _ in sizes]
    for bucket in policy.prompt.floors:
        for at, label in enumerate(about.labels):
            if label == bucket.name and sinks <= at < last:
                prompt[bucket.group][at] = policy.prompt.floors[bucket] if letter else R
    ways: list[tuple[list[list[Level]], dict[LayerBucket, Level] | None]] = []

    def raised(upgrade: Upgrade, table: dict[LayerBucket, Level]) -> None:
        for at in reversed(range(sinks, last)):
            if about.labels[at] == upgrade.bucket.name:
                assert prompt[upgrade.bucket.group][at] is upgrade.start
                prompt[upgrade.bucket.group][at] = upgrade.end
                ways.append(([list(row) for row in prompt], paid(table)))

    ways.append(([list(row) for row in prompt], paid(tables[0])))
    for upgrade in () if letter else policy.prompt.below:
        raised(upgrade, tables[0])
    least = len(ways)
    table = selected
    ways.append(([list(row) for row in prompt], paid(table)))
    rest = policy.prompt.path if letter else policy.prompt.above
    harmed = () if letter else policy.prompt.mending
    there = [
        (upgrade, math.inf if n < len(harmed) else spared(policy.prompt.evidence, upgrade))
        for n, upgrade in enumerate(rest)
        if upgrade.bucket.name in about.labels[sinks:last]
    ]
    # No upgrade is worth more than the one before it on its side: it has to wait for that.
    bound, bound_of_answer = math.inf, math.inf
    while there or later:
        bound = min([bound, *(worth for _, worth in there[:1])])
        bound_of_answer = min([bound_of_answer, *(worth for _, worth in later[:1])])
        if there and (prompt_first or not later or bound >= bound_of_answer):
            raised(there.pop(0)[0], table)
        else:
            table = later.pop(0)[0]
            ways.append(([list(row) for row in prompt], table))
    ways.append((prompt, None))
    return [
        (count(one, table), one, table is not None, answer(table)[1], number < least)
        for number, (one, table) in enumerate(ways)
    ]


TAGS = ("enum/free/critical", "layout/forced/not_critical", "required_value/free/critical")
SOME = (Label.USER, Label.FUNCTION_NAME, Label.TYPE, Label.CHAT_SCAFFOLD)


# Choices that hold the same, but for how their sums round.
@example(4, [Label.USER] * 2, 31, 16, 0, "R,L2,L4,H", (2, 3, 1), False, True)
@example(4, [Label.USER], 32, 16, 0, "R,L2,L4,H", (2, 3, 1), False, True)
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    labels=st.lists(st.sampled_from(SOME), min_size=1, max_size=40),
    expected=st.integers(0, 60),
    page=st.sampled_from([1, 4, 16]),
    sinks=st.integers(0, 4),
    ladder=st.sampled_from(["R,L4,H", "R,H", "R,L2,L4,H"]),
    groups=st.sampled_from([(3,), (1, 2), (2, 3, 1)]),
    letter=st.booleans(),
    prompt_first=st.booleans(),
)
def test_the_choice_is_that_of_the_chain_walked_token_by_token(
    seed: int,
    labels: list[Label],
    expected: int,
    page: int,
    sinks: int,
    ladder: str,
    groups: tuple[int, ...],
    letter: bool,
    prompt_first: bool,
) -> None:
    policy = made_up(seed, TAGS, ["user", "function_name", "type"], groups, ladder=ladder)
    about = PromptInfo(len(labels), sum(groups), 2, 2, 32, expected, page, tuple(labels))
    chain = slow_chain(policy, about, sinks, letter, prompt_first)
    everything = math.ceil((len(labels) + expected) / page) * page
    assert chain[-1][0] == pytest.approx(everything)
    held = []
    for setting in (0.05, 0.3, 0.45, 0.6, 0.75, 0.9, 0.99):
        found = planned(
            policy, about, setting, sinks=sinks, letter=letter, prompt_first=prompt_first
        )
        fits = [one for one in chain if one[0] <= setting * everything + 1e-9]
        slots, prompt, acts, own, floored = (
            fits[-1]
            if fits
            else [one for one in chain if one[0] <= min(each[0] for each in chain) + 1e-9][-1]
        )
        assert found.unreachable == (not fits)
        levels = found.prompt
        if levels is None:
            levels = torch.full((len(groups), len(labels)), 16)
        assert levels.tolist() == [[int(level) for level in row] for row in prompt]
        assert (found.steps is not None) == acts
        if acts:
            room = policy.margin * own + setting * everything - slots
            if floored or any(level < Level.HIGH for row in prompt for level in row):
                selected = next(one[3] for one in chain if not one[4])
                room = min(room, policy.margin * (selected if floored else own))
            assert found.remaining == pytest.approx(max(0.0, room), abs=1e-6)
        held.append(slots)
    assert held == sorted(held)
