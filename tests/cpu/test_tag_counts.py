"""Counting tagged rows: exact numbers on two rows made by hand, then real rows end to end."""

from __future__ import annotations

import contextlib
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from pask.bfcl.answers import render
from pask.bfcl.ceiling import Unpassable, passing_answer
from pask.bfcl.data import load_rows
from pask.bfcl.request import Request, RequestBuilder
from pask.bfcl.splits import build_splits
from pask.cli import main
from pask.config import load
from pask.engine.vocabulary import Vocabulary
from pask.errors import HarnessFault, PaskError
from pask.evaluation.keys import key_parts
from pask.evaluation.model import load_vocabulary
from pask.evaluation.tag_tables import (
    TaggedRow,
    answer_table,
    bucket_table,
    example,
    prompt_table,
    visible,
)
from pask.evaluation.tags import tag_row
from pask.methods.full import FullKV
from pask.structure.labels import Label
from pask.structure.tags import Choice, Next, Phase, Role, Tag, TokenClass
from tests.cpu.tiny import tiny_folder

NAME = Tag(
    TokenClass.FUNCTION_NAME, Role.FUNCTION_SELECTOR, Phase.OPENING, Choice.FREE, Next.CRITICAL
)
TEXT = Tag(TokenClass.STRING, Role.REQUIRED_VALUE, Phase.INSIDE, Choice.FREE, Next.CRITICAL)
SHARED = TEXT._replace(choice=Choice.SHARED)
END = Tag(TokenClass.BOUNDARY, Role.CALL_BOUNDARY, Phase.CLOSING, Choice.FORCED, Next.END)
ROWS = [
    TaggedRow(
        "a_1",
        ((b"Hi\n", Label.USER), (b"f", Label.FUNCTION_NAME), (b"f", Label.FUNCTION_NAME)),
        ((b'"f', NAME), (b"x", TEXT), (b"y", TEXT), (b"\xc3", SHARED), (b"}", END)),
    ),
    TaggedRow("b_2", ((b"Yo", Label.USER),), ((b'"f', NAME), (b"y", TEXT), (b"}", END))),
]


def test_exact_tags_are_counted_by_token_and_by_row() -> None:
    table = answer_table(ROWS)
    assert table.values.tolist() == [
        ["function_name", "function_selector", "opening", "free", "critical", 2, 2, 0.25],
        ["string", "required_value", "inside", "free", "critical", 3, 2, 0.375],
        ["string", "required_value", "inside", "shared", "critical", 1, 1, 0.125],
        ["boundary", "call_boundary", "closing", "forced", "end", 2, 2, 0.25],
    ]


def test_every_label_has_a_line_also_those_that_do_not_occur() -> None:
    table = prompt_table(ROWS).set_index("label")
    assert list(table.index) == [label.value for label in Label]
    assert table.loc["user"].tolist() == [2, 2, 0.5, "yes"]
    assert table.loc["function_name"].tolist() == [2, 1, 0.5, "no"]
    assert table.loc["enum"].tolist() == [0, 0, 0.0, "no"]


def test_buckets_are_counted_in_each_group_of_layers() -> None:
    table = bucket_table(ROWS, "role_choice", (range(0, 1), range(1, 4)))
    assert len(table) == 2 * (22 + len(Label))
    there = table[table["tokens"] > 0].drop(columns=["requests", "example"])
    assert there.values.tolist() == [
        ["decode", "function_selector/free", 0, 0, 0, 2, 2, 0.25],
        ["decode", "function_selector/free", 1, 1, 3, 2, 6, 0.25],
        ["decode", "required_value/free", 0, 0, 0, 3, 3, 0.375],
        ["decode", "required_value/free", 1, 1, 3, 3, 9, 0.375],
        ["decode", "required_value/forced", 0, 0, 0, 1, 1, 0.125],
        ["decode", "required_value/forced", 1, 1, 3, 1, 3, 0.125],
        ["decode", "call_boundary/forced", 0, 0, 0, 2, 2, 0.25],
        ["decode", "call_boundary/forced", 1, 1, 3, 2, 6, 0.25],
        ["prompt", "user", 0, 0, 0, 2, 2, 0.5],
        ["prompt", "user", 1, 1, 3, 2, 6, 0.5],
        ["prompt", "function_name", 0, 0, 0, 2, 2, 0.5],
        ["prompt", "function_name", 1, 1, 3, 2, 6, 0.5],
    ]


def test_an_example_is_the_most_frequent_token_where_it_occurs_first() -> None:
    table = bucket_table(ROWS, "role", (range(0, 1),))
    examples = table.set_index(["stage", "bucket"])["example"]
    assert examples["decode", "required_value"] == '"fx⟦y⟧}'
    assert examples["prompt", "user"] == "⟦Hi↵⟧ff"
    assert examples["decode", "enum"] == examples["prompt", "enum"] == ""


def test_bytes_that_are_no_letters_become_visible() -> None:
    assert visible("é\n\t".encode()) == "é↵⇥"
    assert visible(b"\xc3") == "\\xc3"
    assert visible(b"a\x00\x1b\x7f") == "a\\x00\\x1b\\x7f"


def test_the_row_to_draw_has_both_kinds_of_value_and_then_the_shortest_prompt() -> None:
    optional = TEXT._replace(role=Role.OPTIONAL_VALUE)
    listed = TEXT._replace(role=Role.ENUM)
    prompt = ((b"p", Label.USER),)
    both = TaggedRow("b", prompt * 3, ((b"n", NAME), (b"v", TEXT), (b"o", optional)))
    shorter = replace(both, id="s", prompt=prompt * 2)
    enum = replace(both, id="e", answer=(*both.answer, (b"l", listed)))
    twice = replace(enum, id="t", prompt=prompt, answer=enum.answer * 2)
    assert example([*ROWS, both])["id"] == "b"
    assert example([*ROWS, both, shorter])["id"] == "s"
    assert example([*ROWS, both, shorter, enum, twice])["id"] == "e"
    assert example(ROWS)["id"] == "b_2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model),
            "prompt": "one_example",
            "answer_form": "tool_call",
            "expected_new_tokens": {"nonlive": 24, "live": 24},
        },
        "structure": {"layer_groups": 2},
        "methods": [{"name": "full"}],
    }
    path.write_text(yaml.safe_dump(raw))
    return path


def pask(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> Path:
    """results/tiny after `pask tags` with three rows a category."""
    cwd = tmp_path_factory.mktemp("made")
    code, _, err = pask("tags", "--config", str(config_file), "--sample", "3", cwd=cwd)
    assert code == 0, err
    return cwd / "results/tiny"


def test_counts_page_and_picture_are_written_and_nothing_else(made: Path) -> None:
    names = ["answer_tokens.csv", "buckets.csv", "example.json", "manifest.json"]
    names += ["prompt_tokens.csv", "tags.html", "tags.md"]
    pictures = [f"figures/tags.{kind}" for kind in ("pdf", "png", "svg")]
    written = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    assert written == [*pictures, *(f"tags/{name}" for name in names)]


def test_every_token_of_the_calibration_rows_is_counted_once(made: Path, config_file: Path) -> None:
    """Against tokenising the same texts with the tokenizer alone."""
    config = load(config_file)
    tokenizer = load_vocabulary(config).tokenizer
    rows, answers, left_out = load_rows(), 0, []
    categories = build_splits(rows, "paper", 0).sample("cal").values()
    ids = [row_id for group in categories for row_id in group[:3]]
    for row_id in ids:
        calls = passing_answer(rows[row_id])
        if isinstance(calls, Unpassable):
            left_out.append(row_id)
        else:
            text = render(calls, "tool_call", rows[row_id].functions)
            answers += len(tokenizer(text)["input_ids"])
    manifest = json.loads((made / "tags/manifest.json").read_text())
    assert manifest["rows"] == len(ids) - len(left_out)
    assert sorted(manifest["left_out"]) == sorted(left_out)
    assert manifest["answer_tokens"] == answers
    assert manifest["sample"] == 3
    assert manifest["first_layers"] == [0, 1]
    for name, count in (("answer", answers), ("prompt", manifest["prompt_tokens"])):
        table = pd.read_csv(made / f"tags/{name}_tokens.csv")
        assert table["tokens"].sum() == count
        assert table["share"].sum() == pytest.approx(1, abs=1e-4)
        assert table["requests"].max() <= manifest["rows"]
    buckets = pd.read_csv(made / "tags/buckets.csv")
    decode = buckets[buckets["stage"] == "decode"]
    assert decode.groupby("group")["tokens"].sum().tolist() == [answers, answers]
    assert decode["token_layers"].sum() == 2 * answers


def test_the_row_to_draw_spells_its_prompt_and_its_answer(made: Path) -> None:
    shown = json.loads((made / "tags/example.json").read_text())
    answer = "".join(text for text, *_ in shown["answer_tokens"])
    assert answer.startswith('<tool_call>↵{"name": "')
    assert answer.endswith("}}↵</tool_call>")
    prompt = "".join(text for text, _ in shown["prompt_tokens"])
    row = load_rows()[shown["id"]]
    assert prompt.endswith("<|im_start|>assistant↵")
    assert row.functions[0]["name"] in prompt
    user = "".join(text for text, label in shown["prompt_tokens"] if label == "user")
    assert visible(row.messages[-1]["content"].encode()) in user


def test_the_same_command_writes_the_same_bytes(
    made: Path, config_file: Path, tmp_path: Path
) -> None:
    code, _, err = pask("tags", "--config", str(config_file), "--sample", "3", cwd=tmp_path)
    assert code == 0, err
    for path in made.rglob("tags*/*"):
        again = tmp_path / "results/tiny" / path.relative_to(made)
        assert again.read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("structure.layer_groups=3", "structure.layer_groups: 3 groups of 2 layers; ask for 1 to"),
        ("structure.layer_groups=[0, 2]", "layer 2 begins a group, the model's last layer is 1"),
        ("structure.coarsening=rolle", "unknown coarsening 'rolle'; did you mean 'role'?"),
        ("model.path=/nowhere/at/all", "/nowhere/at/all: no such model"),
        ("model.prompt=nativ", "unknown prompt style 'nativ'; did you mean"),
    ],
)
def test_each_mistake_is_one_line_and_leaves_no_file(
    config_file: Path, tmp_path: Path, override: str, expected: str
) -> None:
    code, _, err = pask("tags", "--config", str(config_file), "--set", override, cwd=tmp_path)
    assert code == 2
    assert expected in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_buckets_do_not_decide_what_a_model_answers(config_file: Path) -> None:
    plain = load(config_file)
    other = load(config_file, ["structure.layer_groups=1", "structure.coarsening=exact"])
    assert key_parts(plain, FullKV(), "d") == key_parts(other, FullKV(), "d")


@pytest.fixture(scope="module")
def vocabulary(config_file: Path) -> Vocabulary:
    return load_vocabulary(load(config_file))


@pytest.fixture(scope="module")
def request_of_one_row(vocabulary: Vocabulary) -> Request:
    builder = RequestBuilder(vocabulary.tokenizer, vocabulary.info, "one_example", "json_list")
    return builder.build(load_rows()["simple_python_0"])


GOLD = (
    '[{"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 5, "unit": "units"}}]'
)


def test_a_tagged_answer_is_its_text_token_by_token(
    vocabulary: Vocabulary, request_of_one_row: Request
) -> None:
    texts = vocabulary.info.decoded_vocab
    row = tag_row(request_of_one_row, GOLD, vocabulary.tokenizer, texts)
    assert b"".join(text for text, _ in row.answer).decode() == GOLD
    assert b"".join(text for text, _ in row.prompt).decode() == request_of_one_row.prompt_text
    assert [label for _, label in row.prompt] == list(request_of_one_row.prompt_labels)
    roles = {tag.role for _, tag in row.answer}
    assert roles >= {Role.FUNCTION_SELECTOR, Role.REQUIRED_VALUE, Role.OPTIONAL_VALUE}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (GOLD.replace("base", "bass"), "refuses a passing answer"),
        (GOLD[:-1], "does not let a passing answer end"),
    ],
)
def test_a_gold_answer_that_the_tag_grammar_refuses_is_a_fault_of_the_harness(
    vocabulary: Vocabulary, request_of_one_row: Request, answer: str, expected: str
) -> None:
    texts = vocabulary.info.decoded_vocab
    with pytest.raises(HarnessFault, match=f"row simple_python_0: .*{expected}"):
        tag_row(request_of_one_row, answer, vocabulary.tokenizer, texts)


def test_a_tokenizer_that_changes_text_is_refused(
    vocabulary: Vocabulary, request_of_one_row: Request
) -> None:
    texts = [text.lower() for text in vocabulary.info.decoded_vocab]
    with pytest.raises(PaskError, match="the tokens of the answer do not spell it"):
        tag_row(request_of_one_row, GOLD.upper(), vocabulary.tokenizer, texts)
