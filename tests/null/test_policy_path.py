"""Upgrade scores, paths, candidates and their costs (Equations 7 and 1)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.policy.evidence import BucketEvidence, Evidence, Failures
from pask.policy.floors import Thresholds, floors, no_floors
from pask.policy.path import (
    Upgrade,
    candidate,
    check_path,
    cost,
    greedy_path,
    path_below,
    ranked_path,
    ratio,
    round_robin_path,
    worth,
)
from pask.structure.buckets import LayerBucket
from tests.null.policy_tables import L4, PAPER, H, R, evidence, evidences, found, packed, taus

A0, A1, B0, B1 = (LayerBucket(name, group) for name in "ab" for group in (0, 1))


def steps_of(path: tuple[Upgrade, ...]) -> list[tuple[LayerBucket, Level, Level]]:
    return [(step.bucket, step.start, step.end) for step in path]


def test_a_ratio_is_distortion_saved_by_the_cost_that_it_takes() -> None:
    bucket = found("a", 1, {R: 2.0, L4: 0.5})
    # m of group 1 is a quarter of the layers: 0.3125 / 4 and 0.6875 / 4.
    assert ratio(bucket, R, L4, (3, 1)) == pytest.approx(1.5 / 0.078125)
    assert ratio(bucket, L4, H, (3, 1)) == pytest.approx(0.5 / 0.171875)
    assert ratio(bucket, R, H, (3, 1)) == pytest.approx(2.0 / 0.25)


def test_an_upgrade_that_distorts_more_is_worth_nothing() -> None:
    assert ratio(found("a", 0, {R: 1.0, L4: 3.0}), R, L4, (1,)) == 0.0
    with pytest.raises(ValueError, match="ratio: HIGH -> LOW4 is no upgrade"):
        ratio(found("a", 0, {R: 1.0, L4: 3.0}), H, L4, (1,))


def test_worth_is_distortion_over_an_answer_by_the_bytes_of_all_tokens() -> None:
    table = evidence(
        found("a", 1, {R: 2.0, L4: 0.5}, tokens=4.0),
        found("b", 1, {R: 2.0, L4: 0.5}, tokens=0.0),
        groups=(3, 1),
    )
    # 9 positions of 200 rows feel it; 4 tokens, whose upgrade takes 0.3125 / 4 each.
    assert worth(table, Upgrade(A1, R, L4, 0.0)) == pytest.approx(1.5 * 9 / 200 / 0.3125)
    assert worth(table, Upgrade(A1, L4, H, 0.0)) == pytest.approx(0.5 * 9 / 200 / 0.6875)
    assert worth(table, Upgrade(B1, R, L4, 0.0)) == 0.0


# One layer a group: R -> L4 costs 5 units of 32, L4 -> H costs 11.
TABLE = evidence(
    found("a", 0, {R: 16.0, L4: 11.0}),  # 5/5 = 1, then 11/11 = 1
    found("a", 1, {R: 31.0, L4: 11.0}),  # 20/5 = 4, then 1
    found("b", 0, {R: 38.0, L4: 33.0}),  # 1, then 33/11 = 3
    found("b", 1, {R: 2.0, L4: 7.0}),  # 0, then 7/11
    groups=(1, 1),
)


def test_a_greedy_path_by_hand_with_its_ties() -> None:
    path = greedy_path(TABLE, no_floors(TABLE))
    assert steps_of(path) == [
        (A1, R, L4),  # 4
        (A0, R, L4),  # 1 like B0 and A1's second; cheaper than the latter, before the former
        (B0, R, L4),  # 1
        (B0, L4, H),  # 3, eligible only now
        (A0, L4, H),  # 1
        (A1, L4, H),  # 1
        (B1, R, L4),  # 0; its second step, better than that, has to wait for it
        (B1, L4, H),
    ]
    assert [step.ratio / 32 for step in path] == pytest.approx([4, 1, 1, 3, 1, 1, 0, 7 / 11])


def test_a_greedy_path_begins_at_the_floors() -> None:
    path = greedy_path(TABLE, {A0: H, A1: L4, B0: L4, B1: H})
    assert steps_of(path) == [(B0, L4, H), (A1, L4, H)]


def test_a_round_robin_path_takes_every_bucket_in_turn() -> None:
    path = round_robin_path(TABLE, {A0: R, A1: H, B0: L4, B1: R})
    assert steps_of(path) == [
        (A0, R, L4),
        (B0, L4, H),
        (B1, R, L4),
        (A0, L4, H),
        (B1, L4, H),
    ]
    assert path[1].ratio == pytest.approx(3 * 32)


def test_candidates_are_the_floors_and_the_first_upgrades() -> None:
    least = {A0: R, A1: R, B0: L4, B1: H}
    path = greedy_path(TABLE, least)
    assert steps_of(path)[:2] == [(A1, R, L4), (B0, L4, H)]
    assert candidate(least, path, 0) == least
    assert candidate(least, path, 2) == {A0: R, A1: L4, B0: H, B1: H}
    assert set(candidate(least, path, len(path)).values()) == {H}
    assert least == {A0: R, A1: R, B0: L4, B1: H}  # left as it was
    for steps in (-1, len(path) + 1):
        with pytest.raises(ValueError, match="candidate: "):
            candidate(least, path, steps)
    with pytest.raises(ValueError, match="does not start where its bucket is"):
        candidate({**least, A1: L4}, path, 1)


def test_a_path_that_skips_or_ends_early_is_refused() -> None:
    least = no_floors(TABLE)
    with pytest.raises(ValueError, match="no adjacent upgrade"):
        check_path(PAPER, least, [Upgrade(A0, R, H, 1.0)])
    with pytest.raises(ValueError, match="ends before"):
        check_path(PAPER, least, greedy_path(TABLE, least)[:-1])


def test_cost_weighs_buckets_by_tokens_and_layers() -> None:
    of = evidence(
        found("a", 0, {R: 1.0, L4: 0.5}, tokens=6.0),
        found("a", 1, {R: 1.0, L4: 0.5}, tokens=6.0),
        found("b", 1, {R: 1.0, L4: 0.5}, tokens=2.0),
        groups=(1, 3),
    )
    # Token-layers: 6, 18 and 6 of 30.
    assert cost(of, {A0: H, A1: R, B1: L4}) == pytest.approx((6 + 0.3125 * 6) / 30)
    assert cost(of, {A0: R, A1: L4, B1: R}) == pytest.approx(0.3125 * 18 / 30)
    assert cost(of, {A0: R, A1: R, B1: R}) == 0.0
    assert cost(of, {A0: H, A1: H, B1: H}) == 1.0
    with pytest.raises(ValueError, match="cost: no bucket has tokens"):
        cost(evidence(found("a", 0, {R: 1.0, L4: 0.5}, tokens=0.0)), {A0: H})


@given(evidences(), taus(), st.booleans())
def test_candidates_are_nested_cost_more_each_step_and_end_with_everything(
    of: Evidence, tau: Thresholds, greedy: bool
) -> None:
    least = floors(of, tau)
    path = (greedy_path if greedy else round_robin_path)(of, least)
    check_path(of.ladder, least, path)
    before, paid = least, cost(of, least)
    for steps in range(1, len(path) + 1):
        table = candidate(least, path, steps)
        changed = [q for q in table if table[q] != before[q]]
        assert changed == [path[steps - 1].bucket]
        assert all(table[q] >= before[q] >= least[q] for q in table)
        assert cost(of, table) > paid
        before, paid = table, cost(of, table)
    assert set(before.values()) == {H}
    assert paid == 1.0


def literal_greedy(of: Evidence, least: dict[LayerBucket, Level]) -> list[LayerBucket]:
    """Equation 7 and "the largest rho_D" by trying every bucket every time, in whole numbers."""
    order, table = [], dict(least)
    bits = {level: level.value + (0 < level.value < 16) for level in of.ladder.actions}
    while any(level < H for level in table.values()):
        best: tuple[int, int, LayerBucket] | None = None
        for bucket in of.buckets:
            level = table[bucket.bucket]
            if level is H:
                continue
            above = min(a for a in of.ladder.actions if a > level)
            gain = int(max(0, bucket.distortion[level] - bucket.distortion[above]))
            price = (bits[above] - bits[level]) * of.groups[bucket.bucket.group]
            # gain / price > best's, or as much for less
            if best is None or (gain * best[1], -price) > (best[0] * price, -best[1]):
                best = gain, price, bucket.bucket
        assert best is not None
        order.append(best[2])
        table[best[2]] = min(a for a in of.ladder.actions if a > table[best[2]])
    return order


@given(evidences(), taus())
def test_a_greedy_path_is_the_literal_one(of: Evidence, tau: Thresholds) -> None:
    least = floors(of, tau)
    assert [step.bucket for step in greedy_path(of, least)] == literal_greedy(of, least)


def test_by_bytes_many_tokens_are_no_advantage() -> None:
    """20 tokens that lose 10 together are worth less a byte than one that loses 1."""
    many, one = LayerBucket("many", 0), LayerBucket("one", 0)
    found = Evidence(
        "prompt",
        Ladder.parse("R,H"),
        (4,),
        1,
        tuple(
            BucketEvidence(
                bucket,
                tokens,
                {Level.RELEASE: lost, Level.HIGH: 0.0},
                {Level.RELEASE: Failures(1, 0, 0, 1)},
                1,
            )
            for bucket, tokens, lost in ((many, 20.0, 10.0), (one, 1.0, 1.0))
        ),
    )
    least = dict.fromkeys((many, one), Level.RELEASE)
    by_token = ranked_path(found, least, "distortion")
    by_byte = ranked_path(found, least, "distortion_per_byte")
    assert [(step.bucket, step.ratio) for step in by_token] == [(many, 10.0), (one, 1.0)]
    assert [(step.bucket, step.ratio) for step in by_byte] == [(one, 1.0), (many, 0.5)]
    with pytest.raises(ValueError, match="unknown ranking 'size'"):
        ranked_path(found, least, "size")


@given(evidences(), taus())
def test_under_a_budget_whatever_did_harm_comes_before_distortion(
    table: Evidence, tau: Thresholds
) -> None:
    side = packed(table, tau, 0)
    tables = [candidate(side.floors, side.above, n) for n in range(len(side.above) + 1)]
    assert set(tables[-1].values()) == {H}
    none = floors(table, Thresholds(0.0, 0.0))
    harmless = tables.index(none)
    assert side.above[harmless:] == greedy_path(table, none)
    for factor in (0.5, 0.25):  # thresholds that are tighter
        assert floors(table, Thresholds(factor * tau.low, factor * tau.high)) in tables
    assert replace(side, tau=None).above == side.path


def test_below_the_floors_the_least_harmful_go_first() -> None:
    table = evidence(
        found("a", 0, {R: 9.0, L4: 1.0}, {R: 8, L4: 6}),  # V 4 and 3 per cent: floor HIGH
        found("a", 1, {R: 5.0, L4: 1.0}, {R: 4}),  # 2 and 0: floor INT4
        found("b", 0, {R: 7.0, L4: 1.0}, {R: 4}),  # as much harm, more distortion
        found("b", 1, {R: 9.0, L4: 9.0}),  # none: floor RELEASE
        groups=(1, 1),
    )
    tau = Thresholds(0.01, 0.02)
    least = floors(table, tau)
    path = path_below(table, least, tau, "distortion")
    assert steps_of(path) == [
        (A0, R, L4),  # 4 times the lower threshold
        (B0, R, L4),  # 2 times, 6 of distortion
        (A1, R, L4),  # 2 times, 4
        (A0, L4, H),  # 1.5 times the upper one
    ]
    by_bytes = evidence(
        *(found(f.bucket.name, f.bucket.group, f.distortion, {R: 4}, 1 + 9 * f.bucket.group)
          for f in table.buckets[1:3]), groups=(1, 1),
    )  # fmt: skip
    least = floors(by_bytes, tau)
    assert steps_of(path_below(by_bytes, least, tau, "distortion")) == [(B0, R, L4), (A1, R, L4)]
    assert steps_of(path_below(by_bytes, least, tau, "distortion_per_byte"))[0] == (B0, R, L4)
    # Without thresholds all harm is too much, and more of it is worse.
    assert steps_of(path_below(table, floors(table, tau), None, "distortion"))[:2] == [
        (A0, R, L4),
        (A0, L4, H),
    ]


@given(evidences(), taus(), st.sampled_from(["distortion", "distortion_per_byte", "round_robin"]))
def test_loosened_thresholds_give_what_is_left_below_the_floors(
    table: Evidence, tau: Thresholds, ranking: str
) -> None:
    least = floors(table, tau)
    path = path_below(table, least, tau, ranking)
    tables = [candidate(no_floors(table), path, n) for n in range(len(path) + 1)]
    assert tables[-1] == least
    assert {(up.start, up.end) for up in path} <= set(table.ladder.upgrades)
    for factor in (1, 2, 4, 64):  # exact in floating point
        if factor * tau.high <= 1:
            assert floors(table, Thresholds(factor * tau.low, factor * tau.high)) in tables
