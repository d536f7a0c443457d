"""Equation 8 on development rows written by hand, and the policy that is packed with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pask.calibration.evidence import Measured
from pask.calibration.policies import policy_file, read_family_policy
from pask.calibration.select import make_policy, select
from pask.calibration.trials import table_key
from pask.config import RunConfig, load
from pask.errors import HarnessFault, PaskError
from pask.methods.levels import Level
from pask.methods.pask import PASK
from pask.policy.floors import Thresholds
from pask.policy.policy import Policy, Scanned, SidePolicy, write_policy
from pask.structure.buckets import LayerBucket
from tests.cpu.pask_policies import LAYOUT, VALUE
from tests.null.policy_tables import L4, H, R, evidence, found

# One bucket, which loses 3 % of the rows when released and 1 % at L4: three families, by tau.
TABLE = evidence(found("a", 0, {R: 2.0, L4: 1.0}, {R: 6, L4: 2}))
BUCKET = LayerBucket("a", 0)
TAU = "0/0,0/1,3/3"
PAIRS = [Thresholds(0.0, 0.0), Thresholds(0.0, 0.01), Thresholds(0.03, 0.03)]
TRIED = [(0, 0, H), (1, 0, L4), (1, 1, H), (2, 0, R), (2, 1, L4), (2, 2, H)]
"""Pair of thresholds, upgrades, level: every candidate, in order."""

ROWS, WRONG = 100, 10  # under Full KV

Line = dict[str, Any]


def lines(
    costs: Mapping[Level, float], failures: Mapping[Level, int], rows: int = ROWS
) -> list[Line]:
    """Development rows of 4 tokens each; the first so many fail at a level."""
    return [
        {
            "reference_correct": n >= WRONG,
            "results": {
                table_key("decode", {BUCKET: level}): {
                    "correct": n >= failures[level],
                    "cost": 4 * cost,
                    "tokens": 4,
                }
                for level, cost in costs.items()
            },
        }
        for n in range(rows)
    ]


def chosen(found: SidePolicy) -> tuple[int, int, Level]:
    assert found.tau is not None
    return PAIRS.index(found.tau), found.steps, found.table[BUCKET]


def selected(alpha: float, dev: Sequence[Line], **fields: Any) -> SidePolicy:
    return select(PASK(**{"tau": TAU, "candidates": 9, **fields}), TABLE, alpha, dev)


COSTS = {R: 0.1, L4: 0.4, H: 1.0}


@pytest.mark.parametrize(
    ("alpha", "released", "low", "expected"),
    [
        (0.05, 15, 10, (2, 0, R)),  # exactly alpha is within it
        (0.05, 16, 15, (1, 0, L4)),
        (0.05, 16, 16, (0, 0, H)),
        (0.07, 17, 10, (2, 0, R)),
        (0.29, 39, 10, (2, 0, R)),
        (0.29, 40, 10, (1, 0, L4)),
        (0.0, 10, 10, (2, 0, R)),
        (0.0, 11, 10, (1, 0, L4)),
        (0.0, 3, 100, (2, 0, R)),  # fewer failures than Full KV's are no increase
    ],
)
def test_the_cheapest_within_alpha(
    alpha: float, released: int, low: int, expected: tuple[int, int, Level]
) -> None:
    found = selected(alpha, lines(COSTS, {R: released, L4: low, H: WRONG}))
    assert chosen(found) == expected
    assert found.alpha == alpha


def test_an_increase_of_exactly_alpha_whatever_its_binary_fraction() -> None:
    """So many of so many more rows, for every per cent that there is."""
    for per_cent in range(91):
        dev = lines(COSTS, {R: WRONG + per_cent, L4: ROWS, H: WRONG})
        assert chosen(selected(per_cent / 100, dev)) == (2, 0, R)
        if per_cent:
            assert chosen(selected((per_cent - 1) / 100, dev)) == (0, 0, H)


def test_everything_at_high_is_always_within() -> None:
    found = selected(0.0, lines(COSTS, {R: 100, L4: 100, H: WRONG}))
    assert chosen(found) == (0, 0, H)
    assert found.candidates[0].increase == 0


def test_cost_is_what_was_measured() -> None:
    """Not what calibration expects: here releasing made answers longer, and L4 shorter."""
    dev = lines({R: 0.5, L4: 0.4, H: 1.0}, {R: 10, L4: 10, H: WRONG})
    assert chosen(selected(0.05, dev)) == (1, 0, L4)


def test_cost_is_a_ratio_of_sums() -> None:
    dev = lines(COSTS, {R: 0, L4: 0, H: WRONG}, rows=20)
    for n, line in enumerate(dev):
        line["results"][table_key("decode", {BUCKET: R})] |= (
            {"cost": 1.0, "tokens": 2} if n % 2 else {"cost": 1.0, "tokens": 8}
        )
    found = selected(0.05, dev)
    assert found.candidates[3].cost == pytest.approx(0.2)


def test_of_equal_costs_the_one_with_fewer_failures() -> None:
    same = {R: 0.4, L4: 0.4, H: 1.0}
    assert chosen(selected(0.05, lines(same, {R: 11, L4: 12, H: WRONG}))) == (2, 0, R)
    assert chosen(selected(0.05, lines(same, {R: 12, L4: 11, H: WRONG}))) == (1, 0, L4)


def test_then_the_earlier_pair_of_thresholds_then_fewer_upgrades() -> None:
    same = {R: 0.4, L4: 0.4, H: 0.4}
    dev = lines(same, {R: 10, L4: 10, H: WRONG})
    assert chosen(selected(0.05, dev)) == (0, 0, H)
    reverse = select(PASK(tau="3/3,0/1,0/0", candidates=9), TABLE, 0.05, dev)
    assert (reverse.tau, reverse.steps) == (PAIRS[2], 0)
    assert chosen(selected(0.05, dev, tau="0/1")) == (1, 0, L4)


def test_all_that_was_seen_is_noted() -> None:
    found = selected(0.05, lines(COSTS, {R: 16, L4: 12, H: WRONG}))
    failures = {R: 16, L4: 12, H: 10}
    noted = [replace(seen, cost=round(seen.cost, 9)) for seen in found.candidates]
    assert noted == [
        Scanned(PAIRS[pair], steps, COSTS[level], ROWS, WRONG, failures[level] - WRONG, 0)
        for pair, steps, level in TRIED
    ]
    assert found.floors == {BUCKET: L4}
    assert [(up.start, up.end) for up in found.path] == [(L4, H)]
    assert found.ranking == "distortion"


def test_without_floors() -> None:
    found = selected(0.05, lines(COSTS, {R: 16, L4: 12, H: WRONG}), floors="none")
    assert (found.tau, found.steps, found.table[BUCKET]) == (None, 1, L4)
    assert found.floors == {BUCKET: R}


def test_a_candidate_that_a_row_lacks_is_a_fault() -> None:
    dev = lines(COSTS, {R: 10, L4: 10, H: WRONG})
    for level in (R, H):
        lacking = [*dev[:-1], {**dev[-1], "results": dict(dev[-1]["results"])}]
        key = table_key("decode", {BUCKET: level})
        del lacking[-1]["results"][key]
        with pytest.raises(HarnessFault, match=f"candidate {key} was not tried on all rows"):
            selected(0.05, lacking)


def test_everything_at_high_that_differs_from_full_kv_is_a_fault() -> None:
    dev = lines(COSTS, {R: 50, L4: 50, H: 17})
    with pytest.raises(HarnessFault, match=r"no candidate of the decode side is within 0\.05"):
        selected(0.05, dev)


def test_no_development_rows() -> None:
    with pytest.raises(PaskError, match=r"no development rows; raise data\.dev_sample"):
        selected(0.05, [])


# The whole policy. Two calibration rows; releasing a value loses the first of them.

CAL: list[Line] = [
    {
        "reference_correct": True,
        "names": names,
        "labels": {"user": tokens},
        "fed": len(names),
        "prompt_tokens": tokens + 5,
        "outcomes": [
            {"side": side, "bucket": bucket, "group": 0, "level": level}
            | {"correct": (bucket, level, tokens) != (VALUE, "R", 6)}
            for side, bucket in (("decode", VALUE), ("decode", LAYOUT), ("prompt", "user"))
            for level in ("R", "L4")
        ],
        "distortions": [
            {"side": side, "bucket": bucket, "group": 0, "level": level}
            | {"positions": 1, "total": total}
            for side, bucket in (("decode", VALUE), ("decode", LAYOUT), ("prompt", "user"))
            for level, total in (("R", 3.0), ("L4", 1.0))
        ],
    }
    for names, tokens in (([VALUE, LAYOUT, VALUE], 6), ([LAYOUT, VALUE], 2))
]
MEASURED = Measured(CAL, (2,), "role_choice_next", "d" * 64)
FLOORS = {LayerBucket(VALUE, 0): L4, LayerBucket(LAYOUT, 0): R}


@pytest.fixture
def config(tmp_path: Path) -> Iterator[RunConfig]:
    """In a folder of its own."""
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": "nowhere",
            "prompt": "format_last",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 20, "live": 20},
        },
        "data": {"cal_sample": {"multiple": 2}, "dev_sample": {"multiple": 2}},
        "decode": {"max_new_tokens": 20},
        "structure": {"layer_groups": 1},
        "methods": [{"name": "pask", "budgets": [0.33, 0.5], "params": {"beta": 0.9}}],
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    with contextlib.chdir(tmp_path):
        yield load(path)


def everywhere() -> list[Line]:
    """Two development rows on which nothing but everything at HIGH is right."""
    tables: list[tuple[str, dict[LayerBucket, Level]]] = [
        ("decode", {LayerBucket(VALUE, 0): value, LayerBucket(LAYOUT, 0): layout})
        for value in (R, L4, H)
        for layout in (R, L4, H)
    ]
    tables += [("prompt", {LayerBucket("user", 0): level}) for level in (R, L4, H)]
    results = {
        table_key(side, table): {"correct": set(table.values()) == {H}, "cost": 1.0, "tokens": 4}
        for side, table in tables
    }
    return [{"reference_correct": right, "results": results} for right in (True, False)]


def packed(config: RunConfig, beta: float = 0.9) -> Policy:
    entry = replace(config.entries[0], params={"beta": beta})
    return make_policy(config, entry, MEASURED, everywhere())


def test_a_policy_has_both_sides_and_what_was_counted(config: RunConfig) -> None:
    found = packed(config)
    assert found.prompt is not None
    assert found.decode.floors == FLOORS
    assert found.prompt.floors == {LayerBucket("user", 0): R}
    assert set(found.decode.table.values()) == set(found.prompt.table.values()) == {H}
    assert (found.decode.alpha, found.prompt.alpha) == (0.05, 0.02)
    assert (found.layers, found.layer_groups, found.recent) == (2, (0,), 4)
    assert found.calibration == {
        "distortion": "local",
        "positions": "affected",
        "rows": 2,
        "right_under_full_kv": 2,
        "answer_tokens": 5,
        "prompt_tokens": 18,
        "development_rows": 2,
        "development_right_under_full_kv": 1,
    }


def test_the_distortion_is_read_as_the_method_says(config: RunConfig) -> None:
    """Of five positions three had felt a value of the first row and one of the second."""
    lines = [
        line
        | {
            "replayed": line["fed"],
            "outcomes": [one | {"propagated": 12.0, "positions": 2} for one in line["outcomes"]],
        }
        for line in CAL
    ]
    expected = {
        ("local", "affected"): 3.0,
        ("local", "all"): 6 / 5,
        ("propagated", "affected"): 6.0,
        ("propagated", "all"): 24 / 5,
    }
    measured = replace(MEASURED, lines=lines)
    for (distortion, positions), released in expected.items():
        method = PASK(distortion=distortion, positions=positions)
        decode, _ = measured.sides(method)
        assert decode.buckets[0].distortion[R] == released


def test_the_reserve_is_of_the_floors(config: RunConfig) -> None:
    """A value takes 5/16 at its floor, layout nothing. After a value come 5/16, 0 and 0; after
    layout 5/16 twice."""
    assert packed(config).reserve == {LAYOUT: 5 / 16, VALUE: 5 / 16}
    assert packed(config, beta=0.5).reserve == {LAYOUT: 5 / 16, VALUE: 0.0}


def test_a_policy_of_this_run_is_read(config: RunConfig) -> None:
    policy = packed(config)
    write_policy(policy_file(config, "pask"), policy)
    assert policy_file(config, "pask") == Path("results/tiny/policies/pask.json")
    # What does not decide it: the budget, and the rows that are evaluated.
    other = replace(config, data=replace(config.data, sample={"multiple": 1}))
    entry = replace(config.entries[1], params={"beta": 0.9})
    assert read_family_policy(other, entry, "d" * 64) == policy


OTHERS: dict[str, Any] = {
    "prompt": lambda c: replace(c, model=replace(c.model, prompt="one_example")),
    "grammar": lambda c: replace(c, model=replace(c.model, answer_form="tool_call")),
    "coarsening": lambda c: replace(c, structure=replace(c.structure, coarsening="role")),
    "layer groups": lambda c: replace(c, structure=replace(c.structure, layer_groups=2)),
    "token limit": lambda c: replace(c, max_new_tokens=21),
    "kv_dtype": lambda c: replace(c, engine=replace(c.engine, kv_dtype="bfloat16")),
    "rows": lambda c: replace(c, data=replace(c.data, dev_sample={"multiple": 3})),
    "parameters": lambda c: c,
    "model and tokenizer": lambda c: c,
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_policy_of_anything_else_is_refused_in_one_line(config: RunConfig, what: str) -> None:
    write_policy(policy_file(config, "pask"), packed(config))
    entry = config.entries[0]
    if what == "parameters":
        entry = replace(entry, params={"beta": 0.9, "sinks": 5})
    model = ("e" if what == "model and tokenizer" else "d") * 64
    with pytest.raises(PaskError) as told:
        read_family_policy(OTHERS[what](config), entry, model)
    line = str(told.value)
    assert "\n" not in line
    assert f"policies/pask.json: the policy was made for another {what} " in line
    assert line.count(", not ") == 1
