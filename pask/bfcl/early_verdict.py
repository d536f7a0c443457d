"""Whether an unfinished answer can still become right, by the rules of BFCL's AST checker.

An answer that has lost its way often writes one list, string or row of calls without end, up to the
token limit. What it says is wrong long before. Here is told from when on, exactly: an answer is
hopeless only where no text that begins like it is right. The rules, each a consequence of
`ast_checker.py`:

- Count. Categories without "multiple" or "parallel" in their names take one call
  (simple_function_checker:wrong_count), the others as many as there are gold calls.
- Assignment. A right answer to a parallel category gives each gold call a call of its own that
  passes `simple_function_checker` with it (the checker removes what it has matched). So the calls
  that are begun must fit different gold calls. Otherwise the first call must fit the first gold
  call, and no other is looked at.
- Arguments. `simple_function_checker` judges every argument alone, by the argument's document and
  its gold alternatives. So a whole argument is judged by the checker itself, on the row reduced to
  that argument, and a whole call on the row reduced to its gold call.
- Unfinished values. Whatever type is declared, a right string equals an alternative after
  `standardize_string`; a right list has the length of an alternative and equals it item by item
  (`list_checker`, `list_dict_checker`, or plain equality where the type counts as a variable's); a
  right dict has keys of an alternative only, each value equal to that of the alternative or to one
  of its parts (`dict_checker`). Their beginnings must begin one of these. An oddity of the
  checker is kept: to it an alternative that is a string is a list of its characters too. An
  unfinished number can become any number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pask.bfcl.answers import (
    BLOCK_BEGIN,
    BLOCK_END,
    BLOCK_SEPARATOR,
    SEPARATORS,
    Call,
    check_answer_form,
)
from pask.bfcl.checker import check
from pask.bfcl.data import Row
from pask.bfcl.unfinished_json import NOTHING, Unfinished, begins, expect, read
from pask.errors import HarnessFault

_LAYOUT = {  # head of the answer; begin, end and separator of a call; tail of the answer
    "json_list": ("[", "", "", SEPARATORS[0], "]"),
    "tool_call": ("", BLOCK_BEGIN, BLOCK_END, BLOCK_SEPARATOR, ""),
}
_IGNORED = re.compile(r"[ \,\.\/\-\_\*\^]")


class EarlyVerdict:
    """Tells from when on an answer to a row cannot be right any more.

    Keeps what it has found out about whole arguments and calls: one object serves all answers to
    its row.
    """

    def __init__(self, row: Row, answer_form: str) -> None:
        self._layout = _LAYOUT[check_answer_form(answer_form)]
        self._parallel = "parallel" in row.category
        several = self._parallel or "multiple" in row.category
        self._most = len(row.gold) if several else 1
        golds = row.gold if self._parallel else row.gold[:1]
        self._wanted = [_Wanted.of(row, gold, by_name=several) for gold in golds]
        self._any = frozenset(range(len(self._wanted)))
        self._fits: dict[str, frozenset[int]] = {}  # by a whole call's text: gold calls it passes

    def hopeless(self, text: str) -> bool:
        """True only if no right answer begins with `text`, a beginning of whole characters.

        False for a text whose layout is not the answer form's: it is not judged.
        """
        try:
            calls = self._calls(text)
        except (ValueError, RecursionError):
            return False
        if len(calls) > self._most:
            return True
        return not _assignable(calls if self._parallel else calls[:1])

    def _calls(self, text: str) -> list[frozenset[int]]:
        """For each call that is begun, the gold calls it may fit; ValueError for another layout."""
        head, begin, end, separator, tail = self._layout
        calls: list[frozenset[int]] = []
        if len(text) <= len(head):
            return calls
        at = expect(head, text, 0)
        while True:
            if at >= len(text) or begins(begin, text, at):
                return [*calls, self._any]
            at = expect(begin, text, at)
            value, after = read(text, at)
            if isinstance(value, Unfinished):
                return [*calls, self._fitting(value)]
            calls.append(self._passing(text[at:after], value))
            at = after
            if begins(end, text, at):
                return calls
            at = expect(end, text, at)
            if at == len(text) or text[at:] == tail:
                return calls
            if begins(separator, text, at):
                return [*calls, self._any]
            at = expect(separator, text, at)

    def _passing(self, text: str, value: Any) -> frozenset[int]:
        """The gold calls that a whole call passes with."""
        if text not in self._fits:
            if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
                raise ValueError("not a call")
            if not isinstance(value["name"], str) or not isinstance(value["arguments"], dict):
                raise ValueError("not a name with its arguments")
            call: Call = {value["name"]: value["arguments"]}
            found = (n for n, wanted in enumerate(self._wanted) if wanted.passes(call))
            self._fits[text] = frozenset(found)
        return self._fits[text]

    def _fitting(self, unfinished: Unfinished) -> frozenset[int]:
        """The gold calls that an unfinished call may still fit."""
        members = dict(unfinished.members)
        name, arguments = members.get("name"), members.get("arguments", NOTHING)
        # They can be whole and the call not: its own brace is missing.
        _, given, _ = _parts(arguments)
        return frozenset(
            n
            for n, wanted in enumerate(self._wanted)
            if wanted.may_be_named(name)
            and all(wanted.may_take(argument, value) for argument, value in given)
        )


class _Wanted:
    """One gold call: whether a call, whole or not, can be right with it."""

    def __init__(self, row: Row) -> None:
        """`row` has one gold call and the document that the checker takes for it."""
        self._row = row
        ((_, self._gold),) = row.gold[0].items()
        document = row.functions[0]
        self._name: str = document["name"]
        self._declared: Mapping[str, Any] = document["parameters"]["properties"]
        self._judged: dict[tuple[str, str], bool] = {}
        self._alone: dict[str, Row] = {}

    @classmethod
    def of(cls, row: Row, gold: Call, *, by_name: bool) -> _Wanted:
        """A gold call of a row; the checker takes its document by name, or else the first one."""
        (name,) = gold
        named = [function for function in row.functions if function["name"] == name]
        document = named[0] if by_name and named else row.functions[0]
        return cls(replace(row, functions=(document,), gold=(gold,)))

    def may_be_named(self, name: Any) -> bool:
        if isinstance(name, Unfinished):
            return self._name.startswith(name.text or "")
        return name is None or name == self._name

    def may_take(self, argument: str, value: Any) -> bool:
        """Whether a right call can have this argument with a value that is, or begins with, this
        one."""
        if argument not in self._declared or argument not in self._gold:
            return False  # simple_function_checker:unexpected_param
        if isinstance(value, Unfinished):
            return _may_become(value, self._gold[argument])
        key = argument, repr(value)
        if key not in self._judged:
            if argument not in self._alone:
                self._alone[argument] = _only(self._row, argument)
            self._judged[key] = _passes(self._alone[argument], {self._name: {argument: value}})
        return self._judged[key]

    def passes(self, call: Call) -> bool:
        return _passes(self._row, call)


def _passes(row: Row, call: Call) -> bool:
    try:
        return check(row, [call]).correct
    except HarnessFault:
        return True  # the whole answer's check will raise it and tell


def _only(row: Row, argument: str) -> Row:
    """The row as if its one gold call had this one argument."""
    (document,), (gold,) = row.functions, row.gold
    ((name, arguments),) = gold.items()
    parameters = document["parameters"]
    narrowed = {
        **parameters,
        "properties": {argument: parameters["properties"][argument]},
        "required": [key for key in parameters["required"] if key == argument],
    }
    return replace(
        row,
        functions=({**document, "parameters": narrowed},),
        gold=({name: {argument: arguments[argument]}},),
    )


def _assignable(calls: Sequence[Iterable[int]]) -> bool:
    """Whether each call can have a gold call of its own, of those that it fits."""
    taken: dict[int, int] = {}  # gold call -> call

    def place(call: int, seen: set[int]) -> bool:
        for gold in calls[call]:
            if gold in seen:
                continue
            seen.add(gold)
            if gold not in taken or place(taken[gold], seen):
                taken[gold] = call
                return True
        return False

    return all(place(call, set()) for call in range(len(calls)))


def standardized(text: str) -> str:
    """A string as the checker compares it: its `standardize_string`."""
    return _IGNORED.sub("", text).lower().replace("'", '"')


def _may_become(value: Any, options: Iterable[Any]) -> bool:
    """Whether a value, or something that begins with it, equals one of `options` to the checker.

    Looser than the checker where that is simpler: it may say yes to what the checker refuses.
    """
    if isinstance(value, str):
        wanted = standardized(value)
        return any(isinstance(o, str) and standardized(o) == wanted for o in options)
    if isinstance(value, Unfinished) and value.text is not None:
        begun = standardized(value.text)
        # At the end of a word this letter becomes another one than within.
        anything = "Σ" in value.text
        return any(
            isinstance(o, str) and (anything or standardized(o).startswith(begun)) for o in options
        )
    items, members, key = _parts(value)
    if items is not None:
        return any(
            isinstance(o, (list, str))
            and len(o) >= len(items)
            and all(_may_become(item, (o[n],)) for n, item in enumerate(items))
            for o in options
        )
    if key is not None:
        return any(
            isinstance(o, dict)
            and (not key or any(name.startswith(key) for name in o))
            and all(k in o and _may_become(v, _values(o[k])) for k, v in members)
            for o in options
        )
    return isinstance(value, Unfinished) or value in options


def _parts(
    value: Any,
) -> tuple[Sequence[Any] | None, Iterable[tuple[str, Any]], str | None]:
    """Items of a list, or None; members of a dict and its unfinished key, or None for no dict."""
    if isinstance(value, Unfinished):
        return value.items, value.members, value.key
    if isinstance(value, list):
        return value, (), None
    if isinstance(value, dict):
        return None, value.items(), ""
    return None, (), None


def _values(gold: Any) -> list[Any]:
    """What a dict's value may equal: the alternative's own value, or one of its parts."""
    return [gold, *gold] if isinstance(gold, (list, str)) else [gold]
