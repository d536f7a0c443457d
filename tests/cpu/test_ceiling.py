"""The ceiling: rows that no output, or no grammar-legal output, can pass."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pask.bfcl.ceiling import Ceiling, Unpassable, measure_ceiling, passing_answer, spellable
from pask.bfcl.checker import check
from pask.bfcl.data import SUBSETS, Row, data_digest, load_rows
from pask.bfcl.splits import build_splits
from pask.errors import HarnessFault, PaskError

COMMITTED = Path(__file__).parents[2] / "configs" / "bfcl-ceiling.json"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return load_rows()


@pytest.fixture(scope="module")
def committed() -> Ceiling:
    return Ceiling.read(COMMITTED)


def row(gold: dict, required: tuple[str, ...] = (), **properties: dict) -> Row:
    function = {
        "name": "f",
        "parameters": {"type": "dict", "properties": properties, "required": list(required)},
    }
    return Row(
        "simple_python_test",
        "simple_python",
        ({"role": "user", "content": "do it"},),
        (function,),
        ({"f": gold},),
    )


def test_the_committed_counts(committed, rows):
    by_subset = {s: [i for i, r in rows.items() if r.category in c] for s, c in SUBSETS.items()}
    assert committed.passable(by_subset["nonlive"]) == 998
    assert committed.passable(by_subset["live"]) == 1333
    assert Counter((r.category, r.reason) for r in committed.rows) == {
        ("parallel_multiple", "grammar"): 2,
        ("live_simple", "checker"): 2,
        ("live_multiple", "checker"): 2,
        ("live_multiple", "grammar"): 13,
        ("live_parallel_multiple", "grammar"): 1,
    }
    assert committed.data_digest == data_digest()
    test = build_splits(rows, "paper", 0).ids("test")
    listed = {r.id for r in committed.rows}
    assert committed.passable(test) == len(set(test) - listed)


def test_measured_again_it_is_the_committed_one(committed, rows):
    assert measure_ceiling(rows) == committed


def test_a_passing_answer_passes_both(rows):
    for r in list(rows.values())[::60]:
        answer = passing_answer(r)
        if not isinstance(answer, Unpassable):
            assert check(r, answer).correct
            assert spellable(r, answer)


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
COLOUR = {"type": "string", "enum": ["RED", "dark-blue"]}


@pytest.mark.parametrize(
    ("gold", "document", "value"),
    [
        (["first", "second"], STRING, "first"),
        (["", "second"], STRING, "second"),
        (["green", "Dark Blue"], COLOUR, "dark-blue"),  # as the enumeration spells it
        ([5.0], INTEGER, 5),
        ([[1.0, 2.0]], {"type": "array", "items": INTEGER}, [1, 2]),
        (
            [{"b": ["x"], "a": ["green", "red"]}],
            {"type": "dict", "properties": {"a": COLOUR, "b": STRING}},
            {"b": "x", "a": "RED"},
        ),
        (
            [[{"a": ["red"]}, {"a": ["dark blue"]}]],
            {"type": "array", "items": {"type": "dict", "properties": {"a": COLOUR}}},
            [{"a": "RED"}, {"a": "dark-blue"}],
        ),
    ],
)
def test_the_search_finds_what_can_pass(gold, document, value):
    assert passing_answer(row({"x": gold}, ("x",), x=document)) == [{"f": {"x": value}}]


def test_an_optional_argument_is_left_out_where_only_that_passes():
    gold = {"x": ["green", ""], "y": ["a"]}
    assert passing_answer(row(gold, x=COLOUR, y=STRING)) == [{"f": {"y": "a"}}]
    refused = passing_answer(row({"x": ["green"], "y": ["a"]}, x=COLOUR, y=STRING))
    assert refused == Unpassable(
        "simple_python_test", "simple_python", "grammar", "f, x: the grammar refuses 'green'"
    )


@pytest.mark.parametrize(
    "one",
    [
        row({"x": []}, x=STRING),  # no right value
        row({"x": ["a"], "z": ["b"]}, x=STRING),  # not in the document
        row({"x": ["a"]}, ("x", "y"), x=STRING, y=STRING),  # required, unknown to the gold
    ],
)
def test_rows_no_output_can_pass(one):
    assert passing_answer(one).reason == "checker"


def test_a_search_cut_short_is_no_proof():
    keys = {f"k{n}": ["a", "b"] for n in range(20)}
    one = row({"x": [keys]}, x={"type": "dict", "properties": dict.fromkeys(keys, COLOUR)})
    with pytest.raises(HarnessFault, match="over 2000 spellings"):
        passing_answer(one)


def test_parts_that_make_no_whole_are_a_harness_fault():
    one = row({"x": ["a"], "y": ["b"]}, x=STRING, y=STRING)
    with pytest.raises(HarnessFault, match="not the whole"):
        passing_answer(one, lambda _, calls: len(calls[0]["f"]) < 2)


def test_file(tmp_path, committed):
    path = tmp_path / "ceiling.json"
    committed.write(path)
    assert path.read_bytes() == COMMITTED.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["ceiling.json"]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda text: text[:-9], "cannot read"),
        (lambda text: text.replace("ceiling-1", "ceiling-0"), "schema"),
        (lambda text: text.replace('"checker"', '"luck"', 1), "unknown reason 'luck'"),
        (lambda text: text.replace("detail", "note"), "cannot read"),
        (lambda text: json.dumps(json.loads(text) | {"data_digest": "0"}), "other BFCL data"),
    ],
)
def test_a_spoilt_file_is_refused(tmp_path, spoil, word):
    path = tmp_path / "ceiling.json"
    path.write_text(spoil(COMMITTED.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(PaskError, match=word) as caught:
        Ceiling.read(path)
    assert "\n" not in str(caught.value)
