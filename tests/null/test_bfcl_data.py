"""The BFCL rows: counts, digests, and one clear line for each way the data can be wrong."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pask.bfcl.data import (
    CATEGORIES,
    SUBSETS,
    Row,
    data_digest,
    load_rows,
    package_root,
    parse_rows,
    pinned,
    subset_of,
)
from pask.errors import PaskError

COUNTS = dict(zip(CATEGORIES, (400, 200, 200, 200, 258, 1053, 16, 24), strict=True))


def lines(*entries: dict) -> bytes:
    return "\n".join(map(json.dumps, entries)).encode()


def question(row_id: str = "parallel_0") -> dict:
    return {
        "id": row_id,
        "question": [[{"role": "user", "content": "hi"}]],
        "function": [{"name": "f", "parameters": {}}],
    }


def answer(row_id: str = "parallel_0") -> dict:
    return {"id": row_id, "ground_truth": [{"f": {}}]}


def refusal(call, *args, **kwargs) -> str:
    """The message of the PaskError that the call raises: one line."""
    with pytest.raises(PaskError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_row_is_there():
    rows = load_rows()
    assert Counter(row.category for row in rows.values()) == COUNTS
    assert len(rows) == 2351
    assert all(row.id == row_id for row_id, row in rows.items())
    assert list(dict.fromkeys(row.category for row in rows.values())) == list(CATEGORIES)
    assert {c: subset_of(c) for c in CATEGORIES} == {
        c: subset for subset, names in SUBSETS.items() for c in names
    }


def test_a_row_is_what_the_files_say():
    row = load_rows(["simple_python"])["simple_python_0"]
    assert row.messages == (
        {
            "role": "user",
            "content": "Find the area of a triangle with a base of 10 units and height of 5 units.",
        },
    )
    assert [f["name"] for f in row.functions] == ["calculate_triangle_area"]
    assert row.gold == (
        {"calculate_triangle_area": {"base": [10], "height": [5], "unit": ["units", ""]}},
    )
    assert sum(m["role"] == "system" for row in load_rows().values() for m in row.messages) == 49


def test_cluster_names_the_tool_set():
    rows = load_rows(SUBSETS["live"])
    assert len({row.cluster for row in rows.values()}) == 535
    row = next(iter(rows.values()))
    assert len(row.cluster) == 16
    same = Row(
        "live_simple_x",
        "live_simple",
        row.messages,
        tuple(dict(reversed(list(f.items()))) for f in row.functions),
        row.gold,
    )
    assert same.cluster == row.cluster  # the order of keys in a doc is no difference


def test_categories_are_read_in_the_order_given():
    rows = load_rows(["live_parallel", "parallel"])
    assert next(iter(rows)) == "live_parallel_0-0-0"
    assert len(rows) == 16 + 200


def test_every_file_is_pinned():
    names = {f"{folder}BFCL_v4_{c}.json" for c in CATEGORIES for folder in ("", "possible_answer/")}
    assert set(pinned()["data"]) == names
    assert data_digest() == "e69df9f07f9d788b57d018502615ec378ebca6279b704673a856ffb02a8e999d"


def test_reading_rows_imports_neither_bfcl_eval_nor_torch():
    code = (
        "import sys; from pask.bfcl.data import load_rows; load_rows(['live_parallel']); "
        "print([m for m in ('bfcl_eval', 'torch', 'xgrammar') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"


def test_unknown_category():
    assert "'simple_java'" in refusal(load_rows, ["simple_java"])


def test_missing_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(load_rows).endswith("--no-deps bfcl-eval==2026.3.23")


@pytest.mark.parametrize("name", ["BFCL_v4_parallel.json", "possible_answer/BFCL_v4_parallel.json"])
def test_changed_file_is_refused_with_both_digests(tmp_path, name):
    (tmp_path / "possible_answer").mkdir()
    for file in ("BFCL_v4_parallel.json", "possible_answer/BFCL_v4_parallel.json"):
        shutil.copy(package_root() / "data" / file, tmp_path / file)
    assert len(load_rows(["parallel"], root=tmp_path)) == 200
    with (tmp_path / name).open("ab") as file:
        file.write(b"\n")
    message = refusal(load_rows, ["parallel"], root=tmp_path)
    assert name in message
    assert f"expected sha256 {pinned()['data'][name]}, found " in message
    assert "bfcl-eval==2026.3.23" in message


def test_missing_file(tmp_path):
    assert "No such file" in refusal(load_rows, ["parallel"], root=tmp_path)


def test_questions_and_answers_must_agree():
    assert list(parse_rows("parallel", lines(question()), lines(answer()))) == ["parallel_0"]
    other = answer("parallel_1")
    assert "without an answer" in refusal(parse_rows, "parallel", lines(question()), lines(other))
    assert "parallel_1" in refusal(
        parse_rows, "parallel", lines(question()), lines(answer(), other)
    )


def test_an_id_occurs_once():
    assert "line 2" in refusal(
        parse_rows, "parallel", lines(question(), question()), lines(answer())
    )


def test_a_torn_line_is_named():
    torn = lines(question()) + b'\n{"id": "parallel_1", "ques'
    assert "questions of parallel, line 2" in refusal(parse_rows, "parallel", torn, lines(answer()))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"id": "simple_python_0"}, "category"),
        ({"category": "simple_java"}, "category"),
        ({"messages": ()}, "messages"),
        ({"messages": ({"role": "user"},)}, "messages"),
        ({"functions": ()}, "functions"),
        ({"gold": ()}, "gold"),
        ({"gold": ({"f": {}, "g": {}},)}, "gold"),
    ],
)
def test_a_row_of_another_shape_is_refused(change, word):
    good = {
        "id": "parallel_0",
        "category": "parallel",
        "messages": ({"role": "user", "content": "hi"},),
        "functions": ({"name": "f", "parameters": {}},),
        "gold": ({"f": {}},),
    }
    assert Row(**good).id == "parallel_0"
    assert word in refusal(Row, **good | change)
