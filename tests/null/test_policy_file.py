"""The policy file: written, read back, and refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from pask.digests import digest
from pask.errors import PaskError
from pask.policy.evidence import Evidence, Failures
from pask.policy.floors import Thresholds, no_floors
from pask.policy.path import greedy_path
from pask.policy.policy import (
    Policy,
    Scanned,
    SidePolicy,
    check_made_for,
    read_policy,
    write_policy,
)
from tests.null.policy_tables import L4, R, evidence, evidences, found, packed

TABLE = evidence(
    found("a/free", 0, {R: 1 / 3, L4: 0.1}, {R: 2}, tokens=2.25),
    found("a/free", 1, {R: 2.5, L4: 0.0}),
    groups=(10, 20),
)
TAU = Thresholds(0.005, 0.01)
SIDE = replace(packed(TABLE, TAU, 1), candidates=(Scanned(TAU, 1, 0.4, 200, 25, 8, 2),))
PROMPT = replace(packed(replace(TABLE, side="prompt"), TAU, 2), candidates=(), tau=None)
POLICY = Policy(
    made_for={"model": "0" * 64, "grammar": "json"},
    layers=30,
    layer_groups=(0, 10),
    coarsening="role_choice_next",
    recent=8,
    beta=0.9,
    decode=SIDE,
    prompt=PROMPT,
    reserve={"a/free": 0.1},
    margin=1.5,
    calibration={"rows": 200, "tokens": [1.5, 2]},
)


def test_a_policy_is_read_as_it_was_written(tmp_path: Path) -> None:
    for policy in (POLICY, replace(POLICY, prompt=None)):
        write_policy(tmp_path / "policy.json", policy)
        back = read_policy(tmp_path / "policy.json")
        assert back == policy
        assert back.digest == policy.digest
        assert list(back.decode.floors) == list(policy.decode.floors)


def test_the_file_is_readable_and_says_its_digest(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy.json", POLICY)
    found = json.loads((tmp_path / "policy.json").read_text())
    assert found["schema"] == 2
    assert found["digest"] == POLICY.digest
    assert found["decode"]["evidence"]["ladder"] == "R,L4,H"
    assert found["decode"]["tau"] == {"low": 0.005, "high": 0.01}
    assert found["prompt"]["tau"] is None
    floor = {"name": "a/free", "group": 0, "level": "L4"}
    assert found["decode"]["floors"] == [floor, {"name": "a/free", "group": 1, "level": "R"}]
    step = found["decode"]["path"][0]
    assert {**step, "ratio": 0} == {
        "name": "a/free",
        "group": 1,
        "start": "R",
        "end": "L4",
        "ratio": 0,
    }
    assert step["ratio"] == pytest.approx(2.5 / (0.3125 * 20 / 30))


@given(evidences())
def test_any_side_comes_back_from_json_as_it_was(of: Evidence) -> None:
    side = packed(of, TAU, 2)
    assert SidePolicy.from_json(json.loads(json.dumps(side.to_json()))) == side


def test_every_part_of_the_content_is_in_the_digest() -> None:
    others = [
        replace(POLICY, made_for={"model": "1" * 64, "grammar": "json"}),
        replace(POLICY, recent=9),
        replace(POLICY, beta=0.8),
        replace(POLICY, coarsening="role"),
        replace(POLICY, decode=replace(SIDE, steps=2)),
        replace(POLICY, decode=replace(SIDE, alpha=0.02)),
        replace(POLICY, decode=replace(SIDE, ranking="round_robin")),
        replace(POLICY, prompt=None),
        replace(POLICY, reserve={"a/free": 0.2}),
        replace(POLICY, calibration={}),
    ]
    assert len({policy.digest for policy in (POLICY, *others)}) == len(others) + 1


def refusal(path: Path) -> str:
    with pytest.raises(PaskError) as refused:
        read_policy(path)
    line = str(refused.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line.removeprefix(f"{path}: ")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert (
        refusal(tmp_path / "policy.json")
        == "there is no such policy; run pask policy make (or snakemake)"
    )
    assert refusal(tmp_path) == "the policy cannot be read; Is a directory"


def test_every_cut_of_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    write_policy(path, POLICY)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, 97):
        path.write_bytes(whole[:length])
        assert refusal(path).startswith("the file holds no whole policy; ")


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"schema": 1}', "\udcff"])
def test_another_files_content_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert refusal(path).startswith("the file holds no whole policy; ")


def leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every number, text and null in a JSON value."""
    if isinstance(value, dict):
        return [way for key, inner in value.items() for way in leaves(inner, (*at, key))]
    if isinstance(value, list):
        return [way for key, inner in enumerate(value) for way in leaves(inner, (*at, key))]
    return [at]


def test_a_change_of_any_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    write_policy(path, POLICY)
    text = path.read_text()
    ways = leaves(json.loads(text))
    assert len(ways) > 100
    for *way, last in ways:
        changed = json.loads(text)
        inner = changed
        for key in way:
            inner = inner[key]
        inner[last] = "x" if not isinstance(inner[last], str) else inner[last] + "x"
        path.write_text(json.dumps(changed))
        expected = "the policy has schema" if last == "schema" else "the policy was changed; "
        assert refusal(path).startswith(expected)


def test_another_schema_is_refused_before_anything_else_is_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"schema": 3, "digest": "0", "sides": []}))
    assert (
        refusal(path)
        == "the policy has schema 3, this version reads 2; run pask policy make (or snakemake)"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("steps", 9), ("ranking", "best"), ("path", []), ("evidence", None)]
)
def test_a_policy_that_contradicts_itself_is_refused_whatever_its_digest(
    tmp_path: Path, key: str, value: Any
) -> None:
    content = POLICY.to_json()
    content["decode"][key] = value
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({**content, "digest": digest(content)}))
    assert refusal(path).startswith("the policy is damaged; ")


def test_what_it_was_made_for_is_compared_by_name() -> None:
    check_made_for(POLICY, {"grammar": "json"}, "policy.json")
    check_made_for(POLICY, POLICY.made_for, "policy.json")
    wanted = {"model": "ab" * 32, "grammar": "json", "style": "chat"}
    with pytest.raises(PaskError) as refused:
        check_made_for(POLICY, wanted, "policy.json")
    assert str(refused.value) == (
        "policy.json: the policy was made for another model 0000000000000000, not"
        " abababababababab; style unknown, not chat; give the run's own policy, or calibrate for it"
    )


def test_sides_fit_the_policy_and_their_own_parts() -> None:
    with pytest.raises(ValueError, match="other layer groups"):
        replace(POLICY, layer_groups=(0, 11))
    with pytest.raises(ValueError, match="evidence of the other one"):
        replace(POLICY, decode=PROMPT)
    with pytest.raises(ValueError, match="not of the evidence's buckets"):
        replace(SIDE, floors={})
    with pytest.raises(ValueError, match="does not start where its bucket is"):
        replace(SIDE, floors=no_floors(TABLE))
    without = SidePolicy(
        TABLE,
        None,
        "distortion",
        no_floors(TABLE),
        greedy_path(TABLE, no_floors(TABLE)),
        0,
        (),
        0.05,
    )
    assert without.cost == 0.0


def test_a_scanned_candidate_says_by_how_much_it_fails_more() -> None:
    seen = Scanned(TAU, 3, 0.5, 200, reference_failures=25, lost=8, gained=2)
    assert (seen.failures, seen.increase) == (31, 0.03)
    assert seen.interval() == Failures(200, 8, 2, 200).interval()
