"""A chat template's rendering of labelled messages, with every character's label known.

The template is rendered twice: once with the messages' real texts and once with marks in their
places. The marks show where each message went; everything between them is the template's own. The
two renderings must agree piece by piece, else the prompt is refused: a label is never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from pask.bfcl.pieces import Piece, Prompt, document_pieces, joined, merged
from pask.errors import PaskError
from pask.structure.labels import Label

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OTHER_STYLE = "choose a prompt style that lists the functions in the system message"


class NoToolTemplate(PaskError):
    """The model's chat template has no place for tools: a native prompt style cannot be used."""


@dataclass(frozen=True)
class Message:
    """One chat turn, its content as pieces."""

    role: str
    pieces: tuple[Piece, ...]

    @property
    def content(self) -> str:
        return joined(self.pieces)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prompt:
    """The messages through the tokenizer's chat template, generation prompt included.

    `tools`: documents in OpenAI form, given to the template's own `tools` parameter.
    Raises PaskError where the tokenizer has no template, the template refuses the messages, knows
    no tools, or writes messages or tools in a way whose parts cannot be told apart.
    """
    text = _render(tokenizer, [message.content for message in messages], messages, tools)
    marks = [f"MessageMark{number:03d}End" for number in range(len(messages))]
    marked = _render(tokenizer, marks, messages, tools)
    if any(mark in text or marked.count(mark) != 1 for mark in marks):
        raise PaskError("the chat template does not write each message once")
    own = _own_pieces(tokenizer, marked, marks, messages, tools)
    return _filled(text, own, marks, messages)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    contents: Sequence[str],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    if not tokenizer.chat_template:
        raise PaskError("the tokenizer has no chat template", todo="use an instruct model")
    turns = [
        {"role": message.role, "content": content}
        for message, content in zip(messages, contents, strict=True)
    ]
    try:
        text = tokenizer.apply_chat_template(
            turns,
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # hybrid models answer at once; other templates ignore it
        )
    except TemplateError as error:
        raise PaskError("the chat template refuses the messages", why=str(error)) from error
    except Exception as error:  # a template is a program: it can divide by zero
        why = f"{type(error).__name__}: {error}"
        raise PaskError("the chat template fails on the messages", why=why) from error
    assert isinstance(text, str)  # one conversation, not tokenised
    return text


def _own_pieces(
    tokenizer: PreTrainedTokenizerBase,
    marked: str,
    marks: Sequence[str],
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> list[Piece]:
    """The marked rendering as pieces: the tool block (what the tools add to it) and the rest."""
    if not tools:
        return [Piece(marked, Label.CHAT_SCAFFOLD)]
    bare = _render(tokenizer, marks, messages, ())
    if bare == marked:
        raise NoToolTemplate("the chat template has no place for tools", todo=_OTHER_STYLE)
    start = _shared(marked, bare)
    rest, bare_rest = marked[start:], bare[start:]
    tail = _shared(rest[::-1], bare_rest[::-1])
    block, end = rest[: len(rest) - tail], rest[len(rest) - tail :]
    return [
        Piece(marked[:start], Label.CHAT_SCAFFOLD),
        *_tool_block(block, tools),
        Piece(end, Label.CHAT_SCAFFOLD),
    ]


def _shared(a: str, b: str) -> int:
    """How many characters the two texts share at their beginning."""
    for length, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return length
    return min(len(a), len(b))


def _tool_block(block: str, tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
    for kind, documents in (("tool", tools), ("function", [tool["function"] for tool in tools])):
        for indent in (None, 4, 2):
            found = _located(block, [document_pieces(d, kind, indent) for d in documents])
            if found is not None:
                return found
    raise PaskError(
        "the chat template writes the tools in a form that cannot be labelled", todo=_OTHER_STYLE
    )


def _located(block: str, documents: Sequence[tuple[Piece, ...]]) -> list[Piece] | None:
    """The documents in the block, and what the template says about them: how to use them and how
    to answer stands before the first or after the last, and cannot be told from a heading."""
    pieces: list[Piece] = []
    for number, document in enumerate(documents):
        before, found, block = block.partition(joined(document))
        if not found:
            return None
        around = Piece(before, Label.TOOL_SCAFFOLD) if number else _said(before)
        pieces += [around, *document]
    return [*pieces, _said(block)]


def _said(text: str) -> Piece:
    words = any(character.isalpha() for character in text)
    return Piece(text, Label.INSTRUCTION if words else Label.TOOL_SCAFFOLD)


def _filled(
    text: str, own: Sequence[Piece], marks: Sequence[str], messages: Sequence[Message]
) -> Prompt:
    """Puts the messages' pieces in the place of their marks, checked against the real text."""
    contents = dict(zip(marks, messages, strict=True))
    order = iter(sorted(marks, key=joined(own).index))
    mark = next(order, None)
    filled: list[Piece] = []
    position = 0
    for piece in own:
        left = piece.text
        while mark is not None and mark in left:
            before, _, left = left.partition(mark)
            position += len(before)
            pieces = contents[mark].pieces
            if not text.startswith(joined(pieces), position):
                pieces = _stripped(pieces)  # many templates trim what they are given
            filled += [Piece(before, piece.label), *pieces]
            position += len(joined(pieces))
            mark = next(order, None)
        filled.append(Piece(left, piece.label))
        position += len(left)
    if joined(filled) != text:
        raise PaskError("the chat template changes the messages that it is given")
    return Prompt(text, merged(filled))


def _stripped(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    kept = list(merged(pieces))
    while kept and not kept[0].text.strip():
        del kept[0]
    while kept and not kept[-1].text.strip():
        del kept[-1]
    if kept:
        kept[0] = Piece(kept[0].text.lstrip(), kept[0].label)
        kept[-1] = Piece(kept[-1].text.rstrip(), kept[-1].label)
    return tuple(kept)
