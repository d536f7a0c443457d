"""A row's answers as a grammar that yields tags: the same texts as `pask.bfcl.grammar` compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pask.bfcl.answers import (
    BLOCK_BEGIN,
    BLOCK_END,
    BLOCK_SEPARATOR,
    SEPARATORS,
    check_answer_form,
)
from pask.bfcl.schema import arguments_schema, function_names
from pask.structure.call_layout import CallLayout
from pask.structure.calls import CallGrammar

LAYOUTS = {
    "json_list": CallLayout(begin="[", separator=SEPARATORS[0], end="]"),
    "tool_call": CallLayout(open=BLOCK_BEGIN, close=BLOCK_END, separator=BLOCK_SEPARATOR),
}


def tag_grammar(functions: Sequence[Mapping[str, Any]], answer_form: str) -> CallGrammar:
    """The tag grammar of one or more calls of these functions in that answer form.

    PaskError for an unknown form and for documents that cannot be converted, as the masks' grammar
    has it.
    """
    layout = LAYOUTS[check_answer_form(answer_form)]
    function_names(functions)
    return CallGrammar(
        {function["name"]: arguments_schema(function) for function in functions}, layout
    )
