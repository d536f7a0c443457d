"""Prompt styles: how a row's functions, its messages and the answer form become one prompt.

A style is chosen by name in the config, per model, on the calibration split. The worked examples
use functions that BFCL does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pask.bfcl.answers import Call, check_answer_form, dumps, render
from pask.bfcl.chat import Message, render_chat
from pask.bfcl.data import Row
from pask.bfcl.pieces import Piece, Prompt, document_pieces, joined
from pask.bfcl.schema import openai_function
from pask.errors import PaskError, known_names
from pask.structure.labels import Label

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Style:
    """What a prompt holds beside the row's own functions and messages.

    `native`: the functions go through the chat template's own tools parameter, else as JSON lines
    into the system message. `examples`: worked examples, by name. `as_turns`: the examples are
    earlier turns of the chat, each with its functions, and the row's functions stand in the last
    turn. `one_call_each`: says that each thing asked takes exactly one call. `format_calls`: the
    functions are one JSON list, and after it the answer's format stands as so many calls with
    placeholder names; 0 for the other layout, format first and then the functions as JSON lines.
    """

    summary: str
    native: bool = False
    examples: tuple[str, ...] = ()
    as_turns: bool = False
    one_call_each: bool = False
    format_calls: int = 0


STYLES: dict[str, Style] = {
    "native": Style("the chat template's own tool format, nothing added", native=True),
    "native_two_call_example": Style(
        "the chat template's own tool format, with one example of two calls",
        native=True,
        examples=("two",),
        one_call_each=True,
    ),
    "one_example": Style(
        "functions in the system message, an example of one call", examples=("one",)
    ),
    "two_call_example": Style(
        "functions in the system message, an example of two calls",
        examples=("two",),
        one_call_each=True,
    ),
    "both_examples": Style(
        "functions in the system message, an example of one call and one of two",
        examples=("one", "two"),
        one_call_each=True,
    ),
    "turns_examples": Style(
        "both examples as earlier turns of the chat, functions in the user's turn",
        examples=("one", "two"),
        as_turns=True,
        one_call_each=True,
    ),
    "format_last": Style(
        "functions as a JSON list in the system message, then the format of one call",
        format_calls=1,
    ),
    "format_last_two_calls": Style(
        "functions as a JSON list in the system message, then the format of two calls",
        format_calls=2,
    ),
}


@dataclass(frozen=True)
class Example:
    request: str
    functions: tuple[dict[str, Any], ...]
    calls: tuple[Call, ...]


def _function(name: str, description: str, **properties: tuple[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "dict",
            "properties": {
                key: {"type": kind, "description": text} for key, (kind, text) in properties.items()
            },
            "required": list(properties),
        },
    }


_LAMP = _function(
    "dim_lamp",
    "Sets the brightness of a lamp.",
    room=("string", "Room that the lamp is in."),
    percent=("integer", "Brightness, 0 to 100."),
)
_PLANT = _function(
    "water_houseplant",
    "Waters a houseplant.",
    plant=("string", "Name of the plant."),
    litres=("float", "Amount of water in litres."),
)
EXAMPLES: dict[str, Example] = {
    "one": Example(
        "Give the fern on the shelf half a litre of water.",
        (_PLANT, _LAMP),
        ({"water_houseplant": {"plant": "fern", "litres": 0.5}},),
    ),
    "two": Example(
        "Dim the lamp in the hall to 40 percent and the one in the study to 75.",
        (_LAMP,),
        (
            {"dim_lamp": {"room": "hall", "percent": 40}},
            {"dim_lamp": {"room": "study", "percent": 75}},
        ),
    ),
}

_TASK = "Answer the user's request by calling the functions you are given."
_FORMS = {
    "json_list": (
        "Write nothing but one JSON list of calls: "
        '[{"name": <function name>, "arguments": {<argument name>: <value>}}]'
    ),
    "tool_call": (
        "Write nothing but calls, each in a block of its own:\n<tool_call>\n"
        '{"name": <function name>, "arguments": {<argument name>: <value>}}\n</tool_call>'
    ),
}
_COMPOSE = (
    "You answer a request by composing function calls. Choose one or more of the functions below."
)
_FORMATS = {
    "json_list": "Write nothing but a JSON list of calls, in this format, ",
    "tool_call": "Write nothing but calls, each in a block of its own, in this format, ",
}
_TYPES = "with the parameter types of the function's description:\n"
_ARGUMENTS = "Use the argument names and types of the function's description."
_ONE_CALL_EACH = "Make exactly one call for each thing asked, no duplicates."


def style_named(name: str) -> Style:
    """The style of that name; PaskError, with the nearest name, where there is none."""
    if name not in STYLES:
        raise PaskError(f"unknown prompt style {name!r}", todo=known_names(name, STYLES))
    return STYLES[name]


def build_prompt(
    row: Row, tokenizer: PreTrainedTokenizerBase, style: str, answer_form: str
) -> Prompt:
    """The row's prompt as text and labelled pieces, ending with the generation prompt.

    The text holds the template's special tokens: tokenise it with `add_special_tokens=False`.
    Raises PaskError naming the row, e.g. for a native style and a template without tools.
    """
    chosen = style_named(style)
    check_answer_form(answer_form)
    try:
        functions = [openai_function(function) for function in row.functions]
        tools = [{"type": "function", "function": f} for f in functions] if chosen.native else []
        messages = _messages(row, functions, chosen, answer_form)
        return render_chat(tokenizer, messages, tools)
    except PaskError as error:
        where = f"prompt style {style!r}, row {row.id}"
        raise type(error)(
            error.what,
            where=f"{where}, {error.where}" if error.where else where,
            why=error.why,
            todo=error.todo,
        ) from error


def _messages(
    row: Row, functions: Sequence[Mapping[str, Any]], style: Style, answer_form: str
) -> list[Message]:
    system = (
        [] if style.format_calls else [Piece(_instruction(style, answer_form), Label.INSTRUCTION)]
    )
    messages: list[Message] = []
    request_head: list[Piece] = []
    if style.format_calls:
        system = _format_last(functions, style.format_calls, answer_form)
    elif style.as_turns:
        request_head = [*_function_lines(functions), Piece("\n\nRequest: ", Label.INSTRUCTION)]
        for name in style.examples:
            messages += _example_turns(EXAMPLES[name], answer_form)
    else:
        if not style.native:
            system += [Piece("\n\n", Label.TOOL_SCAFFOLD), *_function_lines(functions)]
        for name in style.examples:
            system.append(Piece(_example_text(EXAMPLES[name], answer_form), Label.WORKED_EXAMPLE))
    for message in row.messages:
        own = Piece(message["content"], Label.USER)
        if message["role"] == "system":
            separator = "\n\n" if joined(system) else ""
            system += [Piece(separator, Label.INSTRUCTION), own]
        else:
            messages.append(Message(message["role"], (*request_head, own)))
            request_head = []
    return [Message("system", tuple(system)), *messages] if joined(system) else messages


def _instruction(style: Style, answer_form: str) -> str:
    """Native styles say only what the template does not: a native tool format is <tool_call>'s."""
    lines = [] if style.native else [_TASK]
    if not style.native or answer_form != "tool_call":
        lines.append(_FORMS[answer_form])
    if not style.native:
        lines.append(_ARGUMENTS)
    if style.one_call_each:
        lines.append(_ONE_CALL_EACH)
    return "\n".join(lines)


def _format_last(
    functions: Sequence[Mapping[str, Any]], format_calls: int, answer_form: str
) -> list[Piece]:
    """The layout that small models tuned on function calling know best: format at the end."""
    pieces = [Piece(_COMPOSE, Label.INSTRUCTION)]
    for number, function in enumerate(functions):
        before = ", " if number else "\n\nFunctions:\n["
        pieces += [Piece(before, Label.TOOL_SCAFFOLD), *document_pieces(function, "function")]
    placeholders = [
        {f"function_name{i}": {"argument_name1": "value1", "argument_name2": "value2"}}
        for i in range(1, format_calls + 1)
    ]
    shown = render(placeholders, answer_form)
    pieces.append(Piece("]", Label.TOOL_SCAFFOLD))
    pieces.append(Piece(f"\n\n{_FORMATS[answer_form]}{_TYPES}{shown}", Label.INSTRUCTION))
    return pieces


def _function_lines(functions: Sequence[Mapping[str, Any]]) -> list[Piece]:
    pieces = [Piece("Functions:", Label.TOOL_SCAFFOLD)]
    for function in functions:
        pieces += [Piece("\n", Label.TOOL_SCAFFOLD), *document_pieces(function, "function")]
    return pieces


def _example_text(example: Example, answer_form: str) -> str:
    return (
        f"\n\nExample, with other functions:\nRequest: {example.request}\n"
        f"Answer:\n{render(example.calls, answer_form)}"
    )


def _example_turns(example: Example, answer_form: str) -> list[Message]:
    functions = "\n".join(dumps(openai_function(function)) for function in example.functions)
    request = f"Functions:\n{functions}\n\nRequest: {example.request}"
    answer = render(example.calls, answer_form)
    return [
        Message("user", (Piece(request, Label.WORKED_EXAMPLE),)),
        Message("assistant", (Piece(answer, Label.WORKED_EXAMPLE),)),
    ]
