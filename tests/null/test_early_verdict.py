"""No right answer is ever hopeless, and what is hopeless stays wrong however it goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pask.bfcl.answers import Call, MalformedAnswer, parse, render
from pask.bfcl.ceiling import Unpassable, passing_answer
from pask.bfcl.checker import _official_checker, check
from pask.bfcl.data import Row, load_rows
from pask.bfcl.early_verdict import EarlyVerdict, standardized

FORMS = ("json_list", "tool_call")
NAMES = ["f", "g"]


@cache
def right_answers() -> list[tuple[Row, list[Call]]]:
    found = []
    for row in load_rows().values():
        answer = passing_answer(row, lambda *_: True)
        if not isinstance(answer, Unpassable):
            found.append((row, answer))
    return found


def some_of_each_category(count: int) -> list[tuple[Row, list[Call]]]:
    by_category: dict[str, list[tuple[Row, list[Call]]]] = {}
    for row, calls in right_answers():
        by_category.setdefault(row.category, []).append((row, calls))
    assert len(by_category) == 8
    return [one for each in by_category.values() for one in each[:: len(each) // count + 1]]


def right(row: Row, text: str, form: str) -> bool:
    try:
        return check(row, parse(text, form)).correct
    except MalformedAnswer:
        return False


def first_hopeless(row: Row, text: str, form: str = "json_list") -> str | None:
    """The shortest hopeless beginning. From there on all are."""
    verdict = EarlyVerdict(row, form)
    found = [verdict.hopeless(text[:n]) for n in range(len(text) + 1)]
    assert found == sorted(found)
    return text[: found.index(True)] if True in found else None


def row_of(
    category: str, gold: list[dict[str, dict[str, list[Any]]]], types: dict[str, dict[str, Any]]
) -> Row:
    """A row whose functions f and g both have the parameters `types`, none of them required."""
    parameters = {"type": "dict", "properties": types, "required": []}
    return Row(
        f"{category}_x",
        category,
        ({"role": "user", "content": "?"},),
        tuple({"name": name, "description": "", "parameters": parameters} for name in NAMES),
        tuple(gold),
    )


def arguments(text: str, name: str = "f") -> str:
    return f'[{{"name": "{name}", "arguments": {{{text}'


TYPES: dict[str, dict[str, Any]] = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "x": {"type": "float"},
    "l": {"type": "array", "items": {"type": "string"}},
    "n": {"type": "array", "items": {"type": "integer"}},
    "d": {"type": "dict"},
    "ds": {"type": "array", "items": {"type": "dict"}},
}
GOLD: dict[str, list[Any]] = {
    "s": ["New York, NY", "NYC", ""],
    "i": [12, ""],
    "x": [1.5, 2.0, ""],
    "l": [["a b", "Cd"], ["x"], ""],
    "n": [[1, 23], ""],
    "d": [{"k": ["v w", 3], "m": [[1, 2], ""]}, ""],
    "ds": [[{"k": ["v"]}, {"k": ["w"], "m": ["z", ""]}], ""],
}


@pytest.mark.parametrize(
    ("begun", "hopeful", "hopeless"),
    [
        ("string", '"s": "n.e-w YORK', '"s": "n.e-w YORKs'),
        ("another alternative", '"s": "NYC', '"s": "NYc a'),
        ("a string too long", '"s": "New York, NY   ', '"s": "New York, NY   N'),
        ("a string that ended early", '"s": "New York', '"s": "New York"'),
        ("escapes", '"s": "\\u006e\\u0065w\\u', '"s": "\\u006e\\u0065w\\n'),
        ("a number that may go on", '"i": 1', '"i": 1,'),
        ("any number may go on", '"i": 999', '"i": 999}'),
        ("an integer for a float", '"x": 2, ', '"x": 3, '),
        ("a string for a float", '"x": "', '"x": "a'),
        ("items", '"l": ["ab", "c-d"', '"l": ["ab", "c-d",'),
        ("an item", '"l": ["a b", "C', '"l": ["a b", "a'),
        ("items of another alternative", '"l": ["X"]', '"l": ["X",'),
        ("numbers", '"n": [1, 2', '"n": [2,'),
        ("numbers too many", '"n": [1, 23', '"n": [1, 23,'),
        ("keys", '"d": {"', '"d": {"a'),
        ("a dict's value", '"d": {"k": "VW', '"d": {"k": "VWx'),
        ("a dict's list", '"d": {"m": [1, 2', '"d": {"m": [1, 2,'),
        ("a dict in a list", '"ds": [{"k": "v"}, {"m": "Z', '"ds": [{"k": "v"}, {"m": "v'),
        ("dicts too many", '"ds": [{"k": "v"}, {"k": "w"}', '"ds": [{"k": "v"}, {"k": "w"},'),
        ("the next argument", '"i": 12, "n', '"i": 12, "n": "1'),
        ("an undeclared one", '"i": 12, "q', '"i": 12, "q":'),
    ],
)
@pytest.mark.parametrize("category", ["simple_python", "multiple", "parallel"])
def test_from_when_on_an_argument_is_wrong(
    category: str, begun: str, hopeful: str, hopeless: str
) -> None:
    verdict = EarlyVerdict(row_of(category, [{"f": GOLD}], TYPES), "json_list")
    assert not verdict.hopeless(arguments(hopeful))
    assert verdict.hopeless(arguments(hopeless))


def test_half_a_character_is_waited_for() -> None:
    row = row_of("simple_python", [{"f": {"s": ["a😀b"]}}], {"s": {"type": "string"}})
    verdict = EarlyVerdict(row, "json_list")
    for whole in ('"s": "a\\ud83d\\ude00', '"s": "a😀'):
        for n in range(6, len(whole) + 1):
            assert not verdict.hopeless(arguments(whole[:n]))
    assert verdict.hopeless(arguments('"s": "a\\ud83d\\ude01'))
    assert verdict.hopeless(arguments('"s": "a\\ud83dx'))


def test_a_letter_that_changes_at_the_end_of_a_word() -> None:
    """ "ΟΔΟΣ" is "οδος" in small letters, "ΟΔΟΣ Α" without its space "οδοσα"."""
    row = row_of("simple_python", [{"f": {"s": ["ΟΔΟΣ Α"]}}], {"s": {"type": "string"}})
    assert first_hopeless(row, arguments('"s": "ΟΔΟΣ Α"}}]')) is None
    assert first_hopeless(row, arguments('"s": "ΟΔΟΣ"}}]')) == arguments('"s": "ΟΔΟΣ"')


def test_the_checkers_oddities_are_kept() -> None:
    """To the checker, an alternative that is a string is a list of its characters too."""
    row = row_of(
        "simple_python",
        [{"f": {"l": [["q"], "ab"], "d": [{"k": "xy"}]}}],
        {"l": TYPES["l"], "d": TYPES["d"]},
    )
    for value, correct in (("x", True), ("z", False)):
        text = render([{"f": {"l": ["a", "B"], "d": {"k": value}}}], "json_list")
        assert right(row, text, "json_list") == correct
        assert (first_hopeless(row, text) is None) == correct


def test_counts_and_names() -> None:
    one, other = {"f": {"i": [1]}}, {"g": {"i": [2]}}
    types = {"i": TYPES["i"]}
    f1, g2 = '{"name": "f", "arguments": {"i": 1}}', '{"name": "g", "arguments": {"i": 2}}'
    for category in ("simple_python", "multiple", "live_parallel"):
        row = row_of(category, [one], types)
        assert first_hopeless(row, f"[{f1}]") is None
        assert first_hopeless(row, f"[{f1}, {f1}]") == f"[{f1},"
        assert first_hopeless(row, f"[{g2}]") == '[{"name": "g'
    # Without "parallel" in its name a category's first call alone is looked at.
    row = row_of("multiple", [one, other], types)
    assert first_hopeless(row, f"[{f1}, {f1}]") is None
    assert first_hopeless(row, f"[{f1}, {f1}, {f1}]") == f"[{f1}, {f1},"
    assert first_hopeless(row, f"[{g2}, {f1}]") == '[{"name": "g'
    row = row_of("parallel", [one, other], types)
    for text in (f"[{f1}, {g2}]", f"[{g2}, {f1}]"):
        assert first_hopeless(row, text) is None
    # A gold call is taken once.
    assert first_hopeless(row, f"[{f1}, {f1}]") == f'[{f1}, {{"name": "f'
    assert first_hopeless(row, f"[{f1}, {g2}, {g2}]") == f"[{f1}, {g2},"


def test_calls_give_way_to_one_another() -> None:
    """The first call fits both gold calls, the second one of them alone."""
    gold = [{"f": {"i": [1, 2]}}, {"f": {"i": [1]}}]
    row = row_of("parallel", gold, {"i": TYPES["i"]})

    def text(*values: int) -> str:
        return render([{"f": {"i": value}} for value in values], "json_list")

    for values in ((1, 2), (2, 1), (1, 1)):
        assert first_hopeless(row, text(*values)) is None
    assert first_hopeless(row, text(2, 2)) == text(2, 2)[:-2]


def test_a_whole_call_is_the_checker_s_to_judge() -> None:
    """A missing argument shows when the call ends, in both answer forms."""
    row = row_of("simple_python", [{"f": {"i": [1], "s": ["a"]}}], TYPES)
    text = render([{"f": {"i": 1}}], "json_list")
    assert first_hopeless(row, text) == text[:-1]
    text = render([{"f": {"i": 1}}], "tool_call")
    assert first_hopeless(row, text, "tool_call") == text.removesuffix("\n</tool_call>")
    more = render([{"f": {"i": 1, "s": "a"}}] * 2, "tool_call")
    assert first_hopeless(row, more, "tool_call") == more[: len(more) // 2] + "\n"


def test_another_layout_is_not_judged() -> None:
    row = row_of("simple_python", [{"f": {"i": [1]}}], {"i": TYPES["i"]})
    verdict = EarlyVerdict(row, "json_list")
    for text in ("", "[]", "x", '{"name"', "[1, 2", '["f"', '[{"name": ["f"]}, ', "[" * 5000):
        assert not verdict.hopeless(text)
    for text in ('[ {"name": "g"', '[{ "name": "g"', '[{"name" : "g"', '[{"name": "f"\t'):
        assert not verdict.hopeless(text)


def test_strings_are_compared_as_the_checker_does() -> None:
    ast_checker, _ = _official_checker()
    theirs = ast_checker.__globals__["standardize_string"]
    for text in ("A b,c.d/e-f_g*h^i'j\"K", "İSTANBUL ß ΟΔΟΣ", "\t\n\u00a0", ""):
        assert standardized(text) == theirs(text)


@pytest.mark.parametrize("form", FORMS)
def test_no_beginning_of_a_right_answer_is_hopeless(form: str) -> None:
    """Rows of all categories; each answer in both orders of its calls."""
    for row, calls in some_of_each_category(5):
        for ordered in (calls, calls[::-1]) if len(calls) > 1 else (calls,):
            text = render(ordered, form, row.functions)
            assert right(row, text, form)
            assert first_hopeless(row, text, form) is None


def spelled(row: Row, calls: list[Call], pick: random.Random) -> list[Call]:
    """The same calls with other alternatives and other spellings; not always right."""
    golds = {json.dumps(call): call for call in row.gold}
    changed: list[Call] = []
    for call in calls:
        ((name, given),) = call.items()
        gold = pick.choice([g[name] for g in golds.values() if name in g] or [{}])
        new: dict[str, Any] = {}
        for key, value in given.items():
            options = [value, value, *gold.get(key, [])]
            chosen = pick.choice(options)
            if isinstance(chosen, str):
                chosen = pick.choice(
                    [chosen, chosen.upper(), chosen.replace(" ", ", "), f"{chosen}-"]
                )
            if pick.random() < 0.95:
                new[key] = chosen
        changed.append({name: new})
    return changed


def mutations(row: Row, calls: list[Call], pick: random.Random) -> Iterator[list[Call]]:
    """Wrong or right: other spellings, a call twice or not at all, lists and strings too long."""
    yield spelled(row, calls, pick)
    yield [*calls, pick.choice(calls)]
    yield [*calls[:-1], pick.choice(calls)]
    ((name, given),) = calls[0].items()
    if given:
        key = pick.choice(sorted(given))
        value = given[key]
        others: list[Any] = [f"{value} more", [value], 7, None, {"a": value}, True]
        if isinstance(value, list):
            others += [value * 2, value[:-1], value[::-1], [*value, "x"]]
        if isinstance(value, dict):
            others += [{**value, "a": 1}, dict(list(value.items())[1:])]
        if isinstance(value, str):
            others += [value * 2, value[:-1], value.lower(), "'" + value]
        yield [{name: {**given, key: pick.choice(others)}}, *calls[1:]]
        yield [{name: {k: v for k, v in given.items() if k != key}}, *calls[1:]]


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(FORMS))
def test_what_is_hopeless_stays_wrong(pick: random.Random, form: str) -> None:
    """Whole mutated answers, and every hopeless beginning of one with the ends of right ones."""
    row, calls = pick.choice(right_answers())
    ends = render(calls, form, row.functions)
    for mutated in mutations(row, calls, pick):
        if not mutated:
            continue
        text = render(mutated, form, row.functions)
        begun = first_hopeless(row, text, form)
        if right(row, text, form):
            assert begun is None
        elif begun is not None:
            for n in pick.sample(range(len(ends)), 20):
                assert not right(row, begun + ends[n:], form)


def test_wrong_answers_are_found_out_before_their_end() -> None:
    """What runs on without end is found out, in every category: strings, lists and calls."""
    pick = random.Random(3)
    seen: dict[str, set[bool]] = {}
    for row, calls in some_of_each_category(3):
        text = render([*calls, *calls], "json_list", row.functions)
        once = render(calls, "json_list", row.functions)
        begun = first_hopeless(row, text)
        assert begun is not None
        assert len(begun) <= len(once)
        for mutated in mutations(row, calls, pick):
            if mutated and not right(row, render(mutated, "json_list"), "json_list"):
                found = first_hopeless(row, render(mutated, "json_list", row.functions))
                seen.setdefault(row.category, set()).add(found is not None)
    assert len(seen) == 8
    assert all(True in found for found in seen.values())
