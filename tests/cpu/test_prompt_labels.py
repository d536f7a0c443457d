"""Every part of real rows' prompts has its label, in every style, with a real tokenizer."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pask.bfcl.data import CATEGORIES, Row, load_rows
from pask.bfcl.prompts import STYLES, build_prompt
from pask.bfcl.request import RequestBuilder
from pask.bfcl.schema import openai_function
from pask.config import load as load_config
from pask.engine.embedded import SHA256, embedded_model
from pask.engine.gguf import converted_folder
from pask.engine.loading import load_tokenizer
from pask.paths import CONFIGS, cache_dir
from pask.structure.labels import Label
from pask.structure.token_text import TokenText
from tests.cpu.label_tokenizers import info_of, tokenizer_of
from tests.cpu.test_prompts import TEMPLATES

ORDER = list(Label)

# A name as a key and in a description, no description, keys of reserved names, and a user who
# writes the very document.
TRICKY_FUNCTION: dict[str, Any] = {
    "name": "pkg.find",
    "description": "",
    "parameters": {
        "type": "dict",
        "properties": {
            "pkg.find": {"type": "string", "description": 'Say "pkg.find" or año.'},
            "description": {"type": "string", "description": "user", "enum": ["pkg.find", "user"]},
            "type": {
                "type": "array",
                "items": {
                    "type": "dict",
                    "properties": {"año": {"type": "float", "description": "type"}},
                    "required": ["año"],
                },
                "description": "name",
                "default": [],
            },
        },
        "required": ["pkg.find"],
    },
}
IMITATION = f"Functions:\n[{json.dumps(openai_function(TRICKY_FUNCTION), ensure_ascii=False)}]"
TRICKY = Row(
    "simple_python_tricky",
    "simple_python",
    ({"role": "user", "content": IMITATION},),
    (TRICKY_FUNCTION,),
    ({"pkg.find": {}},),
)


@cache
def chosen_rows() -> tuple[Row, ...]:
    rows = load_rows()
    by_category = (
        islice((row for row in rows.values() if row.category == category), 2)
        for category in CATEGORIES
    )
    # A key with ñ, a name with dots, a message of the system's.
    named = ("live_simple_67-31-0", "simple_python_16", "live_simple_58-27-0")
    return (*(row for some in by_category for row in some), *(rows[name] for name in named), TRICKY)


def parts(schema: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[Label, Any, bool]]:
    """Label, path and whether it is the key itself, of every part of a parameter's document."""
    labels = {
        "description": Label.PARAMETER_DESCRIPTION,
        "type": Label.TYPE,
        "enum": Label.ENUM,
        "default": Label.DEFAULT,
        "required": Label.REQUIRED,
    }
    for key, value in schema.items():
        if key == "items":
            yield from parts(value, (*path, "items"))
        elif key == "properties":
            for name, inner in value.items():
                yield Label.PARAMETER_KEY, (*path, key, name), True
                yield from parts(inner, (*path, key, name))
        else:
            yield labels.get(key, Label.OTHER_CONSTRAINT), (*path, key), False


def places(function: dict[str, Any], indent: int | None) -> Iterator[tuple[Label, int, int]]:
    """Where every part stands in the document's JSON: where a mark stands that replaces it.

    Not where its text is found first, for that may be another part's. Empty ones are left out.
    """
    every = [
        (Label.FUNCTION_NAME, ("name",), False),
        (Label.FUNCTION_DESCRIPTION, ("description",), False),
        *parts(function["parameters"], ("parameters",)),
    ]
    for label, path, is_key in every:
        changed = copy.deepcopy(function)
        parent = changed
        for step in path[:-1]:
            parent = parent[step]
        part: Any = path[-1]
        if is_key:
            members = list(parent.items())
            parent.clear()
            parent.update(("THE-MARK" if key == part else key, value) for key, value in members)
        else:
            part, parent[path[-1]] = parent[path[-1]], "THE-MARK"
        start = json.dumps(changed, ensure_ascii=False, indent=indent).index("THE-MARK")
        if isinstance(part, str) and part:
            yield label, start, start + len(json.dumps(part, ensure_ascii=False)) - 2
        elif not isinstance(part, str) and not (indent and part):  # a value of one line
            yield label, start - 1, start - 1 + len(json.dumps(part, ensure_ascii=False))


@cache
def smollm2() -> PreTrainedTokenizerFast:
    folder, _ = converted_folder(embedded_model(cache_dir()), cache_dir(), SHA256)
    return load_tokenizer(folder)


def with_template(tokenizer: PreTrainedTokenizerFast, name: str) -> PreTrainedTokenizerFast:
    spoken = copy.deepcopy(tokenizer)
    spoken.chat_template = TEMPLATES[name]
    return spoken


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("kind", "template"),
    [
        ("SmolLM2", "system_tools"),
        ("SmolLM2", "user_tools"),
        ("SentencePiece as Llama has it", "system_tools"),
    ],
)
def test_every_part_of_a_rows_documents_has_its_label(kind, template, style):
    tokenizer = with_template(smollm2() if kind == "SmolLM2" else tokenizer_of(kind), template)
    builder = RequestBuilder(tokenizer, info_of(tokenizer), style, "json_list")
    indent = 4 if STYLES[style].native and template == "user_tools" else None
    for row in chosen_rows():
        text, ids, labels = builder.prompt(row)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert tuple(encoded["input_ids"]) == ids
        tokens = list(zip(labels, encoded["offset_mapping"], strict=True))
        wanted: list[tuple[Label, int, int]] = []
        position = 0
        for function in map(openai_function, row.functions):
            document = json.dumps(function, ensure_ascii=False, indent=indent)
            position = text.index(document, position)
            found = places(function, indent)
            wanted += [(label, position + start, position + end) for label, start, end in found]
            position += len(document)
        for message in row.messages:
            said = message["content"].strip()
            wanted.append((Label.USER, text.rindex(said), text.rindex(said) + len(said)))
        for expected, start, end in wanted:
            at = bisect_right(tokens, start, key=lambda token: token[1][1])
            for label, (first, after) in tokens[at:]:
                if first >= end:
                    break
                if start <= first and after <= end:
                    assert label is expected, text[first:after]
                else:
                    assert ORDER.index(label) <= ORDER.index(expected), text[first:after]


def test_the_rows_above_hold_what_is_easily_mislabelled():
    functions = [function for row in chosen_rows() for function in row.functions]
    keys = {key for function in functions for key in function["parameters"]["properties"]}
    assert any("." in function["name"] for function in functions)
    assert "año_vehiculo" in keys
    assert {row.category for row in chosen_rows()} == set(CATEGORIES)
    assert {"system", "user"} == {m["role"] for row in chosen_rows() for m in row.messages}
    labels = {label for function in functions for label, _, _ in places(function, None)}
    assert labels >= {Label.ENUM, Label.DEFAULT, Label.REQUIRED, Label.PARAMETER_DESCRIPTION}


def label_counts(rows: list[Row]) -> Counter[Label]:
    config = load_config(CONFIGS / "smollm2-135m-sample.yaml").model
    tokenizer = smollm2()
    builder = RequestBuilder(tokenizer, info_of(tokenizer), config.prompt, config.answer_form)
    counts: Counter[Label] = Counter()
    tokens = 0
    for row in rows:
        _, ids, labels = builder.prompt(row)
        counts.update(labels)
        tokens += len(ids)
        present = set(labels)
        assert {Label.USER, Label.FUNCTION_NAME, Label.CHAT_SCAFFOLD} <= present, row.id
    assert counts.total() == tokens
    return counts


def test_every_tenth_row_is_labelled_in_the_default_style():
    counts = label_counts(list(load_rows().values())[::10])
    assert set(counts) == set(Label) - {Label.WORKED_EXAMPLE}


@pytest.mark.slow
def test_every_row_is_labelled_in_the_default_style():
    rows = list(load_rows().values())
    assert len(rows) == 2351
    assert set(label_counts(rows)) == set(Label) - {Label.WORKED_EXAMPLE}


def test_labelling_takes_less_than_two_microseconds_a_token():
    tokenizer = smollm2()
    row = dataclasses.replace(TRICKY, functions=(TRICKY_FUNCTION,) * 6)
    prompt = build_prompt(row, tokenizer, "one_example", "json_list")
    ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert len(ids) > 1000
    known = TokenText(info_of(tokenizer).decoded_vocab, tokenizer.added_tokens_decoder)
    pieces = [(piece.label, piece.text) for piece in prompt.pieces]
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        known.labels(pieces, ids)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 2e-6 * len(ids)
