"""The semantic label of a prompt token: what the token is in the request that it came from.

Labels are the prompt's side of what tags are for the answer (`pask.structure.tags`). They follow
from how the prompt was put together: no attention, no answer and no search in the text enters.

Whose is the punctuation of a tool document? A name, a key or a description is its text alone; the
quotes, colons, commas and brackets around it are `tool_scaffold`. A constraint is its whole member,
`"type": "string"`: key, colon, value and all quotes in it; the comma after it is scaffold. Nested
parameters (`items`, `properties` in `properties`) are labelled as the outer ones are.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Label(StrEnum):
    """In the order that decides for a token that spans several: the first one is taken."""

    # What was asked for can be read nowhere else, so it comes before everything of the schema's.
    USER = "user"  # the row's own messages, a system message of the row's included
    # What the answer copies. The grammar has these too, but not which of them is meant.
    FUNCTION_NAME = "function_name"
    PARAMETER_KEY = "parameter_key"
    ENUM = "enum"
    # What limits a value. The grammar enforces type and required, but neither default nor others.
    DEFAULT = "default"
    TYPE = "type"
    REQUIRED = "required"  # the list of required keys, and a parameter's own flag of that name
    OTHER_CONSTRAINT = "other_constraint"  # `format`, `maximum`, `optional` and whatever else
    # What explains.
    PARAMETER_DESCRIPTION = "parameter_description"
    FUNCTION_DESCRIPTION = "function_description"
    INSTRUCTION = "instruction"  # how to answer; what a chat template says around its tool list
    WORKED_EXAMPLE = "worked_example"
    # What holds the rest together.
    TOOL_SCAFFOLD = "tool_scaffold"  # punctuation and fixed keys of a tool document, a heading
    CHAT_SCAFFOLD = "chat_scaffold"  # the chat template's: role marks, its default system text


PROTECTED = frozenset({Label.USER})  # nothing else in a request can stand in for it

_RANK = {label: rank for rank, label in enumerate(Label)}


def token_labels(
    spans: Iterable[tuple[Label, int]], tokens: Iterable[tuple[int, int]]
) -> tuple[Label, ...]:
    """Exactly one label for each token.

    `spans`: the text from its beginning to its end, each stretch as its label and its length in
    bytes. `tokens`: the first byte that each token stands for and the one after its last, in the
    text's order. A token of several spans takes the first of their labels in `Label`; one of no
    bytes takes the label of the byte after it, and at the end of the text of the byte before.
    ValueError for tokens out of order or outside the text.
    """
    labels: list[Label] = []
    ends: list[int] = []
    length = 0
    for label, size in spans:
        if size:
            length += size
            labels.append(label)
            ends.append(length)
    found: list[Label] = []
    at, last, before = 0, len(ends) - 1, 0
    for start, end in tokens:
        if not before <= start <= end <= length or last < 0:
            raise ValueError(f"token {len(found)} is out of order or outside the text")
        while at < last and ends[at] <= start:
            at += 1
        until = at
        while ends[until] < end:
            until += 1
        found.append(
            labels[at] if until == at else min(labels[at : until + 1], key=_RANK.__getitem__)
        )
        before = end
    return tuple(found)
