"""The official verdict on one generated answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pask.bfcl.answers import Call, MalformedAnswer, parse
from pask.bfcl.checker import Verdict, check
from pask.bfcl.data import Row


def calls_of(record: Mapping[str, Any], answer_form: str) -> list[Call] | None:
    """The calls of a part file's record; None for an answer that is not complete.

    What the output limit cut off is not complete, even where the text before the cut could be read
    as an answer with fewer calls.
    """
    if record["finish"] != "stop":
        return None
    try:
        return parse(record["text"], answer_form)
    except MalformedAnswer:
        return None


def judge(row: Row, record: Mapping[str, Any], answer_form: str) -> Verdict:
    """BFCL's verdict on a record; HarnessFault where the checker itself raised."""
    return check(row, calls_of(record, answer_form))
