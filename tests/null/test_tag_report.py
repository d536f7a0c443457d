"""The page and the picture on structural tags: what they show, and what damaged files are told."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

from pask.errors import PaskError
from pask.evaluation.tag_tables import TaggedRow, answer_table, bucket_table, example, prompt_table
from pask.report import style
from pask.report.tag_looks import ANSWER_LOOKS, PROMPT_LOOKS, Look
from pask.report.tag_picture import (
    LEGEND_COLUMNS,
    LEGEND_INDENT,
    LEGEND_SIZE,
    MAX_PROMPT,
    Example,
    read_example,
    tag_figure,
    text_width,
)
from pask.report.tags import read_counts, write_page
from pask.structure.calls import CallGrammar, CallLayout
from pask.structure.labels import Label
from pask.structure.tags import Role
from pask.structure.tracker import Tracker

FUNCTIONS = {
    "cook": {
        "type": "object",
        "properties": {
            "dish": {"type": "string"},
            "unit": {"type": "string", "enum": ["g", "oz"]},
            "minutes": {"type": "integer"},
        },
        "required": ["dish", "unit"],
    }
}
ANSWER = (
    "[{", '"name": "', "cook", '", "', 'arguments": {"', "dish", '": "', "π|pie_<b>", '", "',
    'unit": "', "oz", '", "', 'minutes": ', "30", "}}", "]",
)  # fmt: skip
PROMPT = (
    ("<|im_start|>", Label.CHAT_SCAFFOLD), ("system\n", Label.CHAT_SCAFFOLD),
    ("cook", Label.FUNCTION_NAME), ('": ', Label.TOOL_SCAFFOLD), ("dish", Label.PARAMETER_KEY),
    ("Bake a 派, at $5 or $6", Label.USER), (" 🙂\n", Label.USER),
)  # fmt: skip


def tagged() -> TaggedRow:
    tracker = Tracker(CallGrammar(FUNCTIONS, CallLayout(begin="[", separator=", ", end="]")))
    answer = tuple((text.encode(), tracker.accept(text.encode())) for text in ANSWER)
    assert tracker.can_end
    return TaggedRow("simple_python_1", tuple((t.encode(), label) for t, label in PROMPT), answer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tags folder of two equal rows, as counting writes it."""
    rows = [tagged(), replace(tagged(), id="simple_python_2")]
    groups = (range(0, 2), range(2, 3))
    tables = {
        "answer_tokens": answer_table(rows),
        "prompt_tokens": prompt_table(rows),
        "buckets": bucket_table(rows, "role_choice_next", groups),
    }
    for name, table in tables.items():
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    about = {"model": "tiny_model", "split": "paper/cal"}
    (tmp_path / "example.json").write_text(json.dumps(about | example(rows)))
    manifest = about | {
        "prompt": "format_last",
        "answer_form": "json_list",
        "split_seed": 0,
        "split_digest": "0123456789abcdef0123",
        "split_rows": 470,
        "sample": None,
        "rows": 2,
        "left_out": {"simple_python_9": "checker: refused"},
        "answer_tokens": 2 * len(ANSWER),
        "prompt_tokens": 2 * len(PROMPT),
        "coarsening": "role_choice_next",
        "layers": 3,
        "first_layers": [0, 2],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_the_page_shows_each_bucket_that_occurs_with_tokens_share_and_example(
    folder: Path,
) -> None:
    markdown, html = write_page(folder)
    text = markdown.read_text(encoding="utf-8")
    assert "**Answer tokens by bucket: 12 of 44 buckets occur**" in text
    cells = '2 | 6.25 | 2 | : {"dish": "⟦π\\|pie\\_\\<b>⟧", "unit'
    assert f"| required\\_value/free/critical | {cells} |" in text
    cells = '4 | 28.57 | 2 | yes | ↵cook": dish⟦Bake a 派, at \\$5 or \\$6⟧ 🙂↵'
    assert f"| user | {cells} |" in text
    assert "| enum | 0 | 0.00 | 0 | no | – |" in text
    page = html.read_text(encoding="utf-8")
    assert "⟦π|pie_&lt;b&gt;⟧" in page
    assert page.count("<table>") == 2


def test_the_page_says_whose_tokens_these_are_and_what_is_missing(folder: Path) -> None:
    text = write_page(folder)[0].read_text(encoding="utf-8")
    assert "2 rows, 32 answer tokens, 14 prompt tokens" in text
    assert "Answers are passing gold answers, not a model's output" in text
    assert "layers 0–1, 2–2" in text
    assert "Left out, since no answer can pass: 1 (simple_python_9)." in text
    assert "Sample of" not in text


def test_a_sample_says_so_at_the_top(folder: Path) -> None:
    edit(folder / "manifest.json", lambda content: content.update(sample=1))
    assert "> **Sample of 3 of 470 calibration rows.**" in write_page(folder)[0].read_text()


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["manifest.json", "buckets.csv", "prompt_tokens.csv"])
@pytest.mark.parametrize("content", [None, b"", b"[1", b"a,b\n1,2\n", b"\xff\xfe\x00"])
def test_a_missing_or_damaged_file_is_one_line_and_writes_no_page(
    folder: Path, name: str, content: bytes | None
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(PaskError, match=rf"{name}: .*run pask tags again") as caught:
        write_page(folder)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("tags.*"))


def test_counts_of_another_run_are_noticed(folder: Path) -> None:
    edit(folder / "manifest.json", lambda content: content.update(answer_tokens=33))
    with pytest.raises(PaskError, match=r"do not belong together; .*: 32, 14, 14; .* 33, 14, 14"):
        read_counts(folder)


def test_a_number_that_is_none_is_refused(folder: Path) -> None:
    path = folder / "buckets.csv"
    path.write_text(path.read_text().replace(",32,", ",many,").replace(",2,", ",two,", 1))
    with pytest.raises(PaskError, match=r"buckets\.csv: cannot read the counts"):
        read_counts(folder)


@pytest.fixture
def picture(folder: Path) -> Example:
    return read_example(folder / "example.json")


def test_the_picture_is_the_same_bytes_twice_in_three_formats(
    picture: Example, tmp_path: Path
) -> None:
    first = tag_figure(picture, tmp_path / "a")
    with mpl.rc_context({"font.size": 30}):
        second = tag_figure(picture, tmp_path / "b")
    assert [path.name for path in first] == ["tags.png", "tags.svg", "tags.pdf"]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


def svg(picture: Example, folder: Path) -> str:
    return tag_figure(picture, folder)[1].read_text(encoding="utf-8")


def test_the_picture_names_what_it_shows_and_nothing_else(picture: Example, tmp_path: Path) -> None:
    text = svg(picture, tmp_path)
    assert PROMPT_LOOKS[Label.USER].words in text
    assert ANSWER_LOOKS[Role.ENUM].words in text
    assert PROMPT_LOOKS[Label.WORKED_EXAMPLE].words not in text
    assert ANSWER_LOOKS[Role.NESTED].words not in text
    assert "Prompt: 7 tokens" in text
    assert "Answer: 16 tokens" in text


def test_letters_that_the_font_lacks_are_shown_by_their_code(
    picture: Example, tmp_path: Path
) -> None:
    text = svg(picture, tmp_path)
    assert "Bake a U+6D3E, at $5 or $6" in text
    assert "派" not in text


def test_of_a_long_prompt_the_middle_of_the_tool_list_is_left_out_and_says_so(
    picture: Example, tmp_path: Path
) -> None:
    tools = [(f"t{i} ", Label.ENUM if i == 500 else Label.TYPE) for i in range(1000)]
    long = replace(picture, prompt=(*picture.prompt[:2], *tools, *picture.prompt[2:]))
    text = svg(long, tmp_path)
    assert f"... {1007 - MAX_PROMPT} tokens ..." in text
    assert "Prompt: 1007 tokens" in text
    assert "Bake a" in text
    assert PROMPT_LOOKS[Label.TYPE].words in text
    assert ">t0<" in text
    assert ">t500<" not in text
    assert PROMPT_LOOKS[Label.ENUM].words not in text
    assert ">t999<" in text


def test_a_token_longer_than_a_line_is_cut_with_a_mark(picture: Example, tmp_path: Path) -> None:
    text = svg(replace(picture, prompt=(("x" * 500, Label.USER),)), tmp_path)
    (shown,) = re.findall("x{3,}…?", text)
    assert shown.endswith("…")
    assert 80 < len(shown) < 120


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("answer_tokens"),
        lambda content: content.update(prompt_tokens=[]),
        lambda content: content.update(prompt_tokens=[["a", "usr"]]),
        lambda content: content.update(answer_tokens=[["a", "string"]]),
        lambda content: content.update(answer_tokens=[["a", "x", "enum", "whole", "free", "far"]]),
        lambda content: content.update(prompt_tokens=3),
    ],
)
def test_a_damaged_example_is_one_line(
    folder: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit(folder / "example.json", change)
    with pytest.raises(PaskError, match=r"example\.json: cannot read the row to draw") as caught:
        read_example(folder / "example.json")
    assert "\n" not in str(caught.value)


def test_every_label_and_role_has_a_look_whose_words_fit_the_legend() -> None:
    assert set(PROMPT_LOOKS) == set(Label)
    assert set(ANSWER_LOOKS) == set(Role)
    room = 72 * style.PAGE / LEGEND_COLUMNS - LEGEND_INDENT - 12
    for look in (*PROMPT_LOOKS.values(), *ANSWER_LOOKS.values()):
        assert text_width(look.words, LEGEND_SIZE) < room, look.words


# What the three kinds of colour blindness make of linear RGB (Machado et al. 2009, severity 1).
EYES = {
    "all": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
     [0.0193339, 0.1191920, 0.9503041]]
)  # fmt: skip


def linear(color: str) -> np.ndarray:
    part = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / (TO_XYZ @ np.ones(3))
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("looks", [PROMPT_LOOKS, ANSWER_LOOKS], ids=["prompt", "answer"])
def test_colours_of_a_panel_stay_apart_for_every_kind_of_eye(
    eyes: str, looks: dict[Any, Look]
) -> None:
    seen = {name: lab(EYES[eyes] @ linear(look.fill)) for name, look in looks.items()}
    for (a, one), (b, two) in itertools.combinations(seen.items(), 2):
        assert np.linalg.norm(one - two) > 10, (a, b)


@pytest.mark.parametrize("look", [*PROMPT_LOOKS.values(), *ANSWER_LOOKS.values()])
def test_letters_stand_out_from_their_box(look: Look) -> None:
    light, dark = sorted(((TO_XYZ @ linear(c))[1] for c in (look.fill, look.text)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5
