"""The official checker behind our adapter: what passes, what fails and how, and its quirks."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.bfcl import checker
from pask.bfcl.ceiling import Unpassable, passing_answer
from pask.bfcl.checker import Verdict, check
from pask.bfcl.data import Row, load_rows, package_root
from pask.errors import HarnessFault, PaskError


def row(
    gold: list[dict],
    category: str = "simple_python",
    required: tuple[str, ...] = (),
    **properties: dict,
) -> Row:
    """A row whose functions, one for each name in the gold, all take the same parameters."""
    parameters = {"type": "dict", "properties": properties, "required": list(required)}
    names = dict.fromkeys(name for call in gold for name in call)
    return Row(
        f"{category}_test",
        category,
        ({"role": "user", "content": "do it"},),
        tuple({"name": name, "parameters": parameters} for name in names),
        tuple(gold),
    )


def error_type(row: Row, calls: list[dict] | None) -> str:
    verdict = check(row, calls)
    assert verdict.correct == (not verdict.error_type)
    return verdict.error_type


STRING, INTEGER, FLOAT = {"type": "string"}, {"type": "integer"}, {"type": "float"}
BOOLEAN, ANY, DICT = {"type": "boolean"}, {"type": "any"}, {"type": "dict"}
WRONG_SIMPLE, WRONG_VALUE = "type_error:simple", "value_error:others"


@pytest.mark.parametrize(
    ("document", "alternatives", "value", "expected"),
    [
        (FLOAT, [5.0], 5, ""),  # an integer is a float
        (INTEGER, [5], 5.0, WRONG_SIMPLE),  # a float is no integer
        (INTEGER, [1], True, WRONG_SIMPLE),
        (INTEGER, [5], 6, WRONG_VALUE),
        (BOOLEAN, [True], True, ""),
        (STRING, ["New York, NY"], "new york ny", ""),  # case, blanks and ,./-_*^ are no difference
        (STRING, ["a:b"], "a b", "value_error:string"),  # a colon is
        (STRING, [None, "x"], None, ""),  # null where the gold has it first
        (STRING, ["x", None], None, WRONG_SIMPLE),  # and only there
        (STRING, ["x"], None, WRONG_SIMPLE),
        (ANY, ["x"], "x", ""),
        (ANY, [5], 5, ""),  # "any" takes the gold's type
        (INTEGER, ["n"], "n", ""),  # a variable's name in place of its value
        (INTEGER, ["n"], "N", WRONG_VALUE),  # compared as it is
        ({"type": "tuple", "items": FLOAT}, [[1.0, 2.0]], [1.0, 2.0], ""),
        ({"type": "tuple", "items": FLOAT}, [[1.0, 2.0]], (1.0, 2.0), ""),
        ({"type": "array", "items": FLOAT}, [[1.0]], [1], "type_error:nested"),  # not inside a list
        ({"type": "array", "items": STRING}, [["a", "b"]], ["b", "a"], "value_error:list/tuple"),
        (DICT, [{"k": ["v"]}], {"k": "V"}, ""),
        (DICT, [{"k": ["v"], "o": ["w", ""]}], {"k": "v"}, ""),
        (DICT, [{"k": ["v"]}], {}, "value_error:dict_key"),
        (DICT, [{"k": ["v"]}], {"k": "v", "more": 1}, "value_error:dict_key"),
    ],
)
def test_values(document, alternatives, value, expected):
    one = row([{"f": {"x": alternatives}}], x=document)
    assert error_type(one, [{"f": {"x": value}}]) == expected


def test_optional_arguments():
    gold = [{"f": {"must": [1], "may": [2, ""], "must_too": [3]}}]
    one = row(gold, required=("must",), must=INTEGER, may=INTEGER, must_too=INTEGER, other=INTEGER)
    assert error_type(one, [{"f": {"must": 1, "may": 2, "must_too": 3}}]) == ""
    assert error_type(one, [{"f": {"must": 1, "must_too": 3}}]) == ""
    prefix = "simple_function_checker:"
    assert error_type(one, [{"f": {"may": 2, "must_too": 3}}]) == prefix + "missing_required"
    # optional in the document, but the gold does not let it be left out
    assert error_type(one, [{"f": {"must": 1}}]) == prefix + "missing_optional"
    # in the document, but not in the gold
    assert (
        error_type(one, [{"f": {"must": 1, "must_too": 3, "other": 0}}])
        == prefix + "unexpected_param"
    )


def test_dotted_names_are_kept():
    one = row([{"math.factorial": {"n": [5]}}], n=INTEGER)
    assert error_type(one, [{"math.factorial": {"n": 5}}]) == ""
    assert (
        error_type(one, [{"math_factorial": {"n": 5}}]) == "simple_function_checker:wrong_func_name"
    )


@pytest.mark.parametrize(
    ("category", "checker_name"),
    [
        ("simple_python", "simple_function_checker"),
        ("live_simple", "simple_function_checker"),
        ("multiple", "multiple_function_checker"),
        ("live_multiple", "multiple_function_checker"),
        ("parallel", "parallel_function_checker_no_order"),
        ("live_parallel_multiple", "parallel_function_checker_no_order"),
    ],
)
def test_wrong_count(category, checker_name):
    call = {"f": {"n": 5}}
    one = row([{"f": {"n": [5]}}], category, n=INTEGER)
    assert error_type(one, [call]) == ""
    assert error_type(one, [call, call]) == f"{checker_name}:wrong_count"
    assert error_type(one, []) == f"{checker_name}:wrong_count"


def test_parallel_calls_in_any_order():
    one = row(
        [{"f": {"n": [1]}}, {"g": {"n": [2]}}, {"f": {"n": [3]}}], "parallel_multiple", n=INTEGER
    )
    calls = [{"f": {"n": 3}}, {"f": {"n": 1}}, {"g": {"n": 2}}]
    assert error_type(one, calls) == ""
    verdict = check(one, [*calls[:2], {"g": {"n": 4}}])
    assert verdict.error_type == "parallel_function_checker_no_order:cannot_find_match"
    assert "value_error:others" in verdict.error
    assert "{" not in verdict.error  # says what is wrong, does not repeat answer and gold


def test_parallel_matching_is_greedy():
    """The first gold takes the first call it can, even if another gold needed that call."""
    one = row([{"f": {"n": [1, 2]}}, {"f": {"n": [1]}}], "parallel", n=INTEGER)
    assert error_type(one, [{"f": {"n": 2}}, {"f": {"n": 1}}]) == ""
    assert (
        error_type(one, [{"f": {"n": 1}}, {"f": {"n": 2}}])
        == "parallel_function_checker_no_order:cannot_find_match"
    )


def test_what_is_no_list_of_calls():
    one = row([{"f": {"n": [5]}}], n=INTEGER)
    assert error_type(one, None) == "malformed"
    wrong = "ast_decoder:decoder_wrong_output_format"
    assert error_type(one, "f(n=5)") == wrong
    assert error_type(one, [{"f": [5]}]) == wrong
    assert error_type(one, [{}]) == wrong
    # the checker alone would take the first name and pass
    assert error_type(one, [{"f": {"n": 5}, "g": {}}]) == wrong


NESTED = st.recursive(
    st.none() | st.integers() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
)


@given(NESTED | st.lists(st.dictionaries(st.text(max_size=2), NESTED, min_size=1, max_size=1)))
def test_format_check_agrees_with_the_official_one(value):
    assert checker._is_list_of_calls(value) == official_format_check()(value)


@cache
def official_format_check():
    """The runner's function alone: importing its module would make folders beside the package."""
    source = (package_root() / "utils.py").read_text(encoding="utf-8")
    wanted = next(
        node
        for node in ast.parse(source).body
        if getattr(node, "name", "") == "is_function_calling_format_output"
    )
    found: dict = {}
    exec(compile(ast.Module([wanted], []), "utils.py", "exec"), found)
    return found["is_function_calling_format_output"]


def test_gold_passes_everywhere_but_in_four_rows():
    answers = {r.id: (r, passing_answer(r, lambda *_: True)) for r in load_rows().values()}
    refused = {i for i, (_, answer) in answers.items() if isinstance(answer, Unpassable)}
    assert refused == {
        "live_simple_106-63-0",
        "live_simple_112-68-0",
        "live_multiple_862-181-3",
        "live_multiple_964-207-0",
    }
    for i in answers.keys() - refused:
        assert check(*answers[i]) == Verdict(True)
        assert not check(answers[i][0], [*answers[i][1], {"no_such_function": {}}]).correct


def test_inputs_are_left_alone(monkeypatch):
    def vandal(functions, calls, gold, *_):
        for argument in (functions, calls, gold):
            argument[0].clear()
        return {"valid": True, "error": []}

    monkeypatch.setattr(checker, "_official_checker", lambda: (vandal, None))
    one, calls = row([{"f": {"n": [5]}}], n=INTEGER), [{"f": {"n": 5}}]
    before = copy.deepcopy((one, calls))
    assert check(one, calls).correct
    assert (one, calls) == before


def test_a_checker_that_raises_is_the_harness_at_fault(monkeypatch):
    def broken(*_):
        raise KeyError("some/model")

    monkeypatch.setattr(checker, "_official_checker", lambda: (broken, None))
    one = row([{"f": {"n": [5]}}], n=INTEGER)
    with pytest.raises(HarnessFault, match="KeyError") as caught:
        check(one, [{"f": {"n": 5}}])
    assert caught.value.where == "simple_python_test"
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


def test_a_doc_the_gold_does_not_name_is_a_harness_fault():
    one = row([{"f": {"n": [5]}}], "multiple", n=INTEGER)
    broken = Row(one.id, one.category, one.messages, one.functions, ({"g": {"n": [5]}},))
    with pytest.raises(HarnessFault, match="multiple_test"):
        check(broken, [{"g": {"n": 5}}])


def test_an_exception_of_the_checker_is_never_an_answer():
    """It makes floats of integers; no float holds this one. Parsing refuses such an answer."""
    one = row([{"f": {"x": [5.0]}}], x=FLOAT)
    with pytest.raises(HarnessFault, match="OverflowError"):
        check(one, [{"f": {"x": 10**400}}])


def test_a_changed_checker_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "eval_checker/ast_eval/ast_checker.py"
    path.parent.mkdir(parents=True)
    path.write_text("def ast_checker(*_): return {'valid': True}\n")
    monkeypatch.setattr(checker, "package_root", lambda: tmp_path)
    with pytest.raises(PaskError, match="not the pinned one"):
        checker._official_checker.__wrapped__()


def test_loading_shadows_nothing_and_costs_no_sdk():
    code = """
import sys, types
table = types.ModuleType("bfcl_eval.constants.model_config")
if len(sys.argv) > 1:
    sys.modules[table.__name__] = table
from pask.bfcl.checker import _official_checker
_official_checker()
name = table.__name__
assert sys.modules.get(name) is (table if len(sys.argv) > 1 else None)
heavy = {"torch", "openai", "numpy", "tree_sitter", "filelock", "bfcl_eval.utils"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert "bfcl_eval.eval_checker.ast_eval.ast_checker" not in sys.modules
"""
    root = Path(__file__).parents[2]
    for argument in ([], ["there-before"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *argument], cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
