"""The picture of the idea: one real request, every token coloured by what it is for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Polygon, Rectangle

from pask.errors import PaskError
from pask.report import style
from pask.report.tag_looks import ANSWER_LOOKS, PROMPT_LOOKS, WHITE, Look
from pask.structure.labels import Label
from pask.structure.tags import Choice, Next, Phase, Role, Tag, TokenClass

MAX_PROMPT = 350  # tokens; of a longer prompt the middle of the tool list is left out

# Points, as all lengths here but the figure's own width.
LEGEND_COLUMNS, LEGEND_INDENT, LEGEND_SIZE = 3, 16.0, 7.0
_MARGIN = 6.0
_WIDTH = 72 * style.PAGE - 2 * _MARGIN

_SANS, _MONO = "DejaVu Sans", "DejaVu Sans Mono"  # ship with matplotlib
_ADVANCE = 0.602  # width of each letter of _MONO, in font sizes

_TOOL_LIST = frozenset(PROMPT_LOOKS) - {
    Label.USER,
    Label.INSTRUCTION,
    Label.WORKED_EXAMPLE,
    Label.CHAT_SCAFFOLD,
}


@dataclass(frozen=True)
class Box:
    """One token to draw; `look` None is the mark of what was left out."""

    text: str
    look: Look | None
    free: bool = False
    critical: bool = False


@dataclass(frozen=True)
class Example:
    """A row as `pask.evaluation.tags` chose it."""

    about: Mapping[str, Any]
    prompt: tuple[tuple[str, Label], ...]
    answer: tuple[tuple[str, Tag], ...]


def read_example(path: Path) -> Example:
    """Read example.json; PaskError where it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        prompt = tuple((str(text), Label(label)) for text, label in content["prompt_tokens"])
        answer = tuple((str(text), _tag(parts)) for text, *parts in content["answer_tokens"])
        if not prompt or not answer:
            raise ValueError("no tokens")
        about = {name: str(content[name]) for name in ("id", "model", "split")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PaskError(
            "cannot read the row to draw",
            where=str(path),
            why=str(error),
            todo="run pask tags again",
        ) from error
    return Example(about, prompt, answer)


def _tag(parts: Sequence[str]) -> Tag:
    token_class, role, phase, choice, next_ = parts
    return Tag(TokenClass(token_class), Role(role), Phase(phase), Choice(choice), Next(next_))


def tag_figure(example: Example, folder: Path, stem: str = "tags") -> list[Path]:
    """Write <stem>.png, .svg and .pdf: the prompt by label, the answer by role; the paths.

    Byte for byte the same for the same example.
    """
    with style.house_style():
        drawing = _Drawing()
        drawing.heading("What a request and its grammar already say about every token", 8.5)
        drawing.gap(3)
        drawing.heading(f"Prompt: {len(example.prompt)} tokens, each with one label", 7.5)
        boxes = _prompt_boxes(example.prompt)
        drawing.boxes(boxes, 6.6)
        drawing.gap(5)
        shown = {box.look for box in boxes}
        drawing.legend(look for look in PROMPT_LOOKS.values() if look in shown)
        drawing.gap(7)
        drawing.heading(
            f"Answer: {len(example.answer)} tokens, each with a tag; the colour is its role", 7.5
        )
        drawing.boxes([_answer_box(text, tag) for text, tag in example.answer], 8.5)
        drawing.gap(5)
        roles = {tag.role for _, tag in example.answer}
        drawing.legend(look for role, look in ANSWER_LOOKS.items() if role in roles)
        drawing.marks()
        drawing.gap(4)
        drawing.paragraph(_caption(example))
        return style.save(drawing.finished(), folder, stem)


def _caption(example: Example) -> str:
    about = example.about
    free = [(text, tag) for text, tag in example.answer if tag.choice is Choice.FREE]
    values = [(text, tag) for text, tag in free if tag.role is Role.REQUIRED_VALUE]
    text, tag = [*values, *free, *example.answer][0]
    return (
        f"BFCL row {about['id']} ({about['split']}) with a gold answer, in {about['model']}'s "
        "tokens: a label follows from how the prompt was put together and a tag from the grammar "
        f"and the accepted text alone (that of “{_drawable(text).strip()}” is class "
        f"{tag.token_class}, role {tag.role}, state {tag.phase}/{tag.choice}, next {tag.next}), so "
        "that what a token is for is known without a look at attention."
    )


def _answer_box(text: str, tag: Tag) -> Box:
    free, critical = tag.choice is Choice.FREE, tag.next is Next.CRITICAL
    return Box(_drawable(text), ANSWER_LOOKS[tag.role], free, critical)


def _prompt_boxes(prompt: Sequence[tuple[str, Label]]) -> list[Box]:
    boxes = [Box(_drawable(text), PROMPT_LOOKS[label]) for text, label in prompt]
    too_many = len(boxes) - MAX_PROMPT
    if too_many <= 0:
        return boxes
    tools = [at for at, (_, label) in enumerate(prompt) if label in _TOOL_LIST]
    middle = (tools[0] + tools[-1] + 1) // 2 if len(tools) > too_many else len(boxes) // 2
    start = middle - too_many // 2
    mark = Box(f" ... {too_many} tokens ... ", None)
    return [*boxes[:start], mark, *boxes[start + too_many :]]


def _drawable(text: str) -> str:
    """The text with a code in place of each letter that the font lacks."""
    font = get_font(findfont(FontProperties(family=_MONO)))
    return "".join(c if font.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in text)


def text_width(text: str, size: float) -> float:
    """Points that a line of the figure's proportional letters takes."""
    font = get_font(findfont(FontProperties(family=_SANS)))
    font.set_size(size, 72)
    font.set_text(text)
    return float(font.get_width_height()[0] / 64)


def _wrapped(text: str, size: float) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, size) <= _WIDTH:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


class _Drawing:
    """Stacks headings, boxes and text from the top down; all lengths in points."""

    def __init__(self) -> None:
        self._y = 0.0  # of what comes next; grows downwards
        self._figure = Figure()
        self._axes: Axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()

    def finished(self) -> Figure:
        height = self._y + 2 * _MARGIN
        self._figure.set_size_inches(style.PAGE, height / 72)
        self._axes.set_xlim(-_MARGIN, _WIDTH + _MARGIN)
        self._axes.set_ylim(self._y + _MARGIN, -_MARGIN)
        return self._figure

    def gap(self, height: float) -> None:
        self._y += height

    def heading(self, text: str, size: float) -> None:
        self._text(0, size * 0.8, text, size, fontweight="bold")
        self._y += size * 1.7

    def paragraph(self, text: str, size: float = 7.0) -> None:
        for line in _wrapped(text, size):
            self._text(0, size * 0.7, line, size, color=style.SOFT)
            self._y += size * 1.4

    def boxes(self, boxes: Iterable[Box], size: float) -> None:
        """Tokens in reading order; a line ends at the margin or after a line break."""
        boxes = list(boxes)
        marked = any(box.critical for box in boxes)
        advance, height = size * _ADVANCE, size * 1.75
        pitch = height + (0.45 * size if marked else 0.0)
        x = 0.0
        for box in boxes:
            longest = int(_WIDTH / advance) - 1
            text = box.text if len(box.text) <= longest else box.text[: longest - 1] + "…"
            width = len(text) * advance + 0.32 * size
            if x + width > _WIDTH:
                x = 0.0
                self._y += pitch
            self._box(x, width, height, text, box, size)
            x += width
            if text.endswith("↵"):
                x = 0.0
                self._y += pitch
        self._y += pitch if x else 0.0

    def _box(self, x: float, width: float, height: float, text: str, box: Box, size: float) -> None:
        look = box.look or Look(WHITE, style.INK, "")
        inset = 0.13 * size
        self._fill(x + 0.5, inset, width - 1.0, height - 2 * inset, look.fill)
        letters = text.lstrip(" ")  # SVG drops spaces at the start
        start = x + 0.16 * size + (len(text) - len(letters)) * size * _ADVANCE
        self._text(start, height / 2, letters.rstrip(" "), size, color=look.text, family=_MONO)
        if box.free:
            self._outline(x, inset, width, height, size)
        if box.critical:
            self._triangle(x + width, height, size)

    def _outline(self, x: float, inset: float, width: float, height: float, size: float) -> None:
        self._axes.add_patch(
            Rectangle(
                (x + 0.5, self._y + inset), width - 1.0, height - 2 * inset,
                fill=False, edgecolor=style.INK, linewidth=0.17 * size, joinstyle="miter",
            )
        )  # fmt: skip

    def _triangle(self, x: float, height: float, size: float) -> None:
        """A small mark below the border to the next token."""
        top, half = self._y + height - 0.12 * size, 0.3 * size
        corners = [(x, top), (x - half, top + 1.5 * half), (x + half, top + 1.5 * half)]
        self._axes.add_patch(Polygon(corners, facecolor=style.INK, edgecolor="none", zorder=4))

    def legend(self, looks: Iterable[Look], size: float = LEGEND_SIZE) -> None:
        """Patches of colour with their words, in equal columns."""
        shown = list(looks)
        step, line = _WIDTH / LEGEND_COLUMNS, size * 1.6
        for at, look in enumerate(shown):
            x = at % LEGEND_COLUMNS * step
            if at and not at % LEGEND_COLUMNS:
                self._y += line
            self._fill(x, 0.15 * line, 12, 0.7 * line, look.fill, edge=style.SOFT)
            self._text(x + LEGEND_INDENT, line / 2, look.words, size)
        self._y += line

    def marks(self, size: float = LEGEND_SIZE) -> None:
        """The legend of the outline and of the triangle."""
        line = size * 1.6
        self._fill(0.5, 0.15 * line, 11, 0.7 * line, WHITE)
        self._axes.add_patch(
            Rectangle(
                (0.7, self._y + 0.15 * line), 10.6, 0.7 * line,
                fill=False, edgecolor=style.INK, linewidth=1.4, joinstyle="miter",
            )
        )  # fmt: skip
        self._text(LEGEND_INDENT, line / 2, "free: the grammar left a choice in this token", size)
        x = _WIDTH / 2
        self._triangle(x + 6, 0.45 * line, size)
        self._text(x + LEGEND_INDENT, line / 2, "critical: a choice that decides comes next", size)
        self._y += line

    def _fill(
        self, x: float, y: float, width: float, height: float, color: str, edge: str = "none"
    ) -> None:
        self._axes.add_patch(
            Rectangle(
                (x, self._y + y), width, height, facecolor=color, edgecolor=edge, linewidth=0.4
            )
        )

    def _text(self, x: float, y: float, text: str, size: float, **how: Any) -> None:
        self._axes.text(x, self._y + y, text, fontsize=size, va="center_baseline", ha="left", **how)
