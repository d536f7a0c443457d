"""How each label and role is drawn, and what a reader who knows no grammar calls it."""

from __future__ import annotations

from typing import NamedTuple

from pask.report import style
from pask.structure.labels import Label
from pask.structure.tags import Role


class Look(NamedTuple):
    """How a label or role is drawn, and what the legend calls it."""

    fill: str
    text: str  # colour of the letters
    words: str


WHITE = "#ffffff"
# Kin share a colour across prompt and answer. Any two of a panel stay apart (CIE 1976 distance of
# 10 or more) for every kind of colour vision, and letters have a contrast of 4.5 or more.
PROMPT_LOOKS: dict[Label, Look] = {
    Label.USER: Look("#0072b2", WHITE, "the user's own words: protected"),
    Label.FUNCTION_NAME: Look("#b54a00", WHITE, "function name"),
    Label.PARAMETER_KEY: Look("#e69f00", style.INK, "argument name"),
    Label.ENUM: Look("#c384b1", style.INK, "list of allowed values"),
    Label.DEFAULT: Look("#f5cc50", style.INK, "default value"),
    Label.TYPE: Look("#f6e6a1", style.INK, "type"),
    Label.REQUIRED: Look("#70643c", WHITE, "which arguments are required"),
    Label.OTHER_CONSTRAINT: Look("#cab581", style.INK, "other limit on a value"),
    Label.PARAMETER_DESCRIPTION: Look("#d0e5ff", style.INK, "what an argument means"),
    Label.FUNCTION_DESCRIPTION: Look("#93a5fc", style.INK, "what the function does"),
    Label.INSTRUCTION: Look("#adbfc2", style.INK, "how to answer"),
    Label.WORKED_EXAMPLE: Look("#dfbbff", style.INK, "worked example"),
    Label.TOOL_SCAFFOLD: Look("#ececef", style.INK, "punctuation of the tool list"),
    Label.CHAT_SCAFFOLD: Look("#8e897e", style.INK, "marks of the chat"),
}
ANSWER_LOOKS: dict[Role, Look] = {
    Role.FUNCTION_SELECTOR: Look("#b54a00", WHITE, "which function"),
    Role.ENUM: Look("#c384b1", style.INK, "value from a fixed list"),
    Role.REQUIRED_VALUE: Look("#00805d", WHITE, "required value"),
    Role.OPTIONAL_VALUE: Look("#a6ddc9", style.INK, "optional value"),
    Role.NESTED: Look("#7b6ba8", WHITE, "inside a list or object"),
    Role.REQUIRED_KEY: Look("#e69f00", style.INK, "name of a required argument"),
    Role.OPTIONAL_KEY: Look("#f8e0a6", style.INK, "name of an optional argument"),
    Role.CALL_BOUNDARY: Look("#55555e", WHITE, "where calls begin and end"),
    Role.ARGUMENT_BOUNDARY: Look("#b4b4bc", style.INK, "between arguments"),
    Role.LAYOUT: Look("#ececef", style.INK, "fixed text"),
}
