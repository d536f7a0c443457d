"""The grammars, by real xgrammar on real rows: what they hold and refuse, both forms alike."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar as xgr
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pask.bfcl import grammar as grammar_module
from pask.bfcl.answers import ANSWER_FORMS, MalformedAnswer, parse, render
from pask.bfcl.ceiling import Ceiling, Unpassable, passing_answer
from pask.bfcl.data import CATEGORIES, Row, load_rows
from pask.bfcl.grammar import GrammarCompiler, accepts
from pask.bfcl.schema import arguments_schema, calls_schema
from pask.errors import PaskError
from pask.structure.byte_vocabulary import STOP, byte_vocabulary

BYTES = byte_vocabulary()

CEILING = Path(__file__).parents[2] / "configs" / "bfcl-ceiling.json"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return load_rows()


@pytest.fixture(scope="module")
def sample(rows) -> list[Row]:
    """15 rows a category, drawn once, and the row whose key holds ñ."""
    drawn = random.Random(7)
    ids = ["live_simple_67-31-0"]
    for category in CATEGORIES:
        ids += drawn.sample([i for i, row in rows.items() if row.category == category], 15)
    return [rows[i] for i in ids]


def right_calls(row: Row) -> list[dict[str, dict[str, Any]]] | None:
    """Calls that the official checker passes and the list form holds; None where there are none."""
    calls = passing_answer(row)
    return None if isinstance(calls, Unpassable) else calls


def check_right_answers(some: list[Row]) -> None:
    """Every row but the listed ones has a right answer, and both forms hold it."""
    listed = {row.id for row in Ceiling.read(CEILING).rows}
    for row in some:
        calls = right_calls(row)
        assert (calls is None) == (row.id in listed), row.id
        for form in ANSWER_FORMS if calls else ():
            text = render(calls, form, row.functions)
            assert accepts(row.functions, text, form), text
            assert parse(text, form) == calls


def test_right_answers_are_legal(sample):
    check_right_answers(sample)


@pytest.mark.slow
def test_right_answers_of_all_rows_are_legal(rows):
    check_right_answers(list(rows.values()))


@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_illegal_variants_are_refused(sample, form):
    tried = dict.fromkeys(("space", "after", "unknown", "type", "order", "missing", "cut"), 0)
    for row in sample:
        calls = right_calls(row)
        if calls is None:
            continue
        text = render(calls, form, row.functions)
        ((name, arguments),) = calls[0].items()
        schema = next(arguments_schema(f) for f in row.functions if f["name"] == name)
        variants = {
            "space": [
                text.replace(": ", ":", 1),
                text.replace(": ", ":  ", 1),
                text.replace(', "arguments"', ',"arguments"', 1),
                text.replace("{", "{ ", 1),
                text.replace("}", "\n}", 1),
                " " + text,
            ],
            "after": [text + suffix for suffix in (" ", "\n", ".", text, "\n\n" + text)],
            "cut": [text[:-1], text[: len(text) // (2 * len(calls))], ""],
            "unknown": [
                render([{name: {**arguments, "not_there": 1}}], form),
                render([{"no_such_function": arguments}], form),
                text.replace('{"name"', '{"id": 1, "name"', 1),
            ],
        }
        for key, own in schema["properties"].items():
            if own.get("type") in ("integer", "boolean", "string", "number") and key in arguments:
                wrong = {**arguments, key: [arguments[key]]}
                variants.setdefault("type", []).append(render([{name: wrong}], form, row.functions))
        if len(arguments) > 1:
            backwards = dict(reversed(render_order(arguments, schema)))
            variants["order"] = [render([{name: backwards}], form)]
        for key in schema["required"]:
            fewer = {k: v for k, v in arguments.items() if k != key}
            variants.setdefault("missing", []).append(render([{name: fewer}], form, row.functions))
        for kind, texts in variants.items():
            for variant in texts:
                assert variant != text
                assert not accepts(row.functions, variant, form), (row.id, kind, variant)
                tried[kind] += 1
    assert min(tried.values()) > 80, tried


def render_order(arguments, schema):
    return [(key, arguments[key]) for key in schema["properties"] if key in arguments]


def test_empty_and_foreign_answers_are_refused(sample):
    for row, form in itertools.product(sample[:20], ANSWER_FORMS):
        other_form = next(f for f in ANSWER_FORMS if f != form)
        foreign = render(right_calls(row) or [{"f": {}}], other_form, row.functions)
        for text in ("[]", "{}", "<tool_call>\n\n</tool_call>", "Sure.", foreign):
            assert not accepts(row.functions, text, form)


TEXT = {"type": "dict", "properties": {"s": {"type": "string"}}, "required": []}
FUNCTIONS = [{"name": "pkg.f", "parameters": TEXT}, {"name": "g", "parameters": TEXT}]


def legal_bytes(matcher: xgr.GrammarMatcher) -> set[int]:
    mask = xgr.allocate_token_bitmask(1, 257)
    if not matcher.fill_next_token_bitmask(mask):
        return set(range(257))
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:257]
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_random_walks_end_in_parsable_valid_calls(sample, form):
    """Whatever a model chooses under the mask: if it stops, the answer parses and validates."""
    drawn = random.Random(3)
    compiler = GrammarCompiler(BYTES, form)
    finished, refused = 0, []
    for row in sample[::4]:
        matcher = xgr.GrammarMatcher(compiler.compile(row.id, row.functions))
        written = bytearray()
        for step in itertools.count():
            allowed = legal_bytes(matcher)
            assert allowed, f"{row.id}: nothing is legal after {bytes(written)!r}"
            ending = allowed & ({*b'"]}', STOP} if step > 400 else {*b'"'})
            readable = allowed & {*b"\n", *range(32, 127), STOP} or allowed
            token = drawn.choice(sorted(ending if ending and drawn.random() < 0.5 else readable))
            assert matcher.accept_token(token)
            if token == STOP or step > 3000:
                break
            written.append(token)
        try:
            parsed = parse(written.decode(), form)
        except MalformedAnswer as error:
            if token == STOP:
                refused.append(str(error))
            continue
        finished += 1
        items = [{"name": n, "arguments": a} for call in parsed for n, a in call.items()]
        jsonschema.validate(items, calls_schema(row.functions))
    assert finished > 10
    # What the grammar cannot see: 1e999, half a surrogate pair, a key twice in a free-form dict.
    unseen = ("too large", "surrogates", "comes twice")
    assert all(any(words in why for words in unseen) for why in refused), refused


def test_after_a_call_only_another_call_or_the_end_is_legal():
    after = {}
    for form, cut in (("json_list", 1), ("tool_call", 0)):
        text = render([{"g": {}}], form)
        matcher = xgr.GrammarMatcher(GrammarCompiler(BYTES, form).compile("r", FUNCTIONS))
        assert matcher.accept_string(text[: len(text) - cut])
        after[form] = legal_bytes(matcher)
        if cut:
            assert matcher.accept_string(text[-cut:])
            assert legal_bytes(matcher) == {STOP}
    assert after["json_list"] == {ord(","), ord("]")}
    assert after["tool_call"] == {ord("\n"), STOP}


@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_rows_that_cannot_be_compiled_are_named(form):
    compiler = GrammarCompiler(BYTES, form)
    odd = {"name": "f", "parameters": {"properties": {"p": {"type": "HashMap"}}}}
    with pytest.raises(PaskError, match=r"row r_1, function 'f', parameter 'p'.*'HashMap'"):
        compiler.compile("r_1", [odd])
    with pytest.raises(PaskError, match=r"row r_2.*without functions"):
        compiler.compile("r_2", [])


def listed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


@pytest.mark.parametrize("form", ANSWER_FORMS)
@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "dict"}, "cannot compile"),
        ({"type": "object", "properties": {}, "required": ["p"]}, "refuses"),
        ({"type": "object", "properties": {"name": {}, "arguments": {}}}, "allows"),
        ({}, "allows"),
    ],
)
def test_a_grammar_that_is_not_the_schemas_is_refused(form, item, words, monkeypatch):
    """What xgrammar refuses, and what it compiles without a word into no or any answer."""
    monkeypatch.setattr(grammar_module, "any_call_schema", lambda _: item)
    monkeypatch.setattr(grammar_module, "calls_schema", lambda _: listed(item))
    with pytest.raises(PaskError, match=f"row r_3.*{words}"):
        GrammarCompiler(BYTES, form).compile("r_3", FUNCTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_every_row_compiles_alone(rows, form):
    """Without the compiler's cache, so that no row leans on another's grammar."""
    for row in rows.values():
        assert GrammarCompiler(BYTES, form).compile(row.id, row.functions).memory_size_bytes > 0


def test_control_tokens_are_never_text():
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "[PAD7]"]
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision|>"]})
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in
           ("<|im_end|>", "<|vision|>", "<tool_call>", "[PAD7]")}  # fmt: skip
    info = grammar_module.tokenizer_info(tokenizer, 300, [ids["<|im_end|>"]])
    assert info.vocab_size == 300
    assert info.stop_token_ids == [ids["<|im_end|>"]]
    compiled = GrammarCompiler(info, "tool_call").compile("r", FUNCTIONS)
    mask = xgr.allocate_token_bitmask(1, 300)

    def allowed(matcher):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:300]
        return {token for token, i in ids.items() if bits[i]}, int(bits.sum())

    matcher = xgr.GrammarMatcher(compiled)
    assert allowed(matcher) == ({"<tool_call>"}, 2)  # the token, or "<" alone
    begin = '<tool_call>\n{"name": "pkg.f", "arguments": {"s": "'
    assert matcher.accept_string(begin)
    assert allowed(matcher)[0] == {"<tool_call>"}  # mere text, inside a string
    assert matcher.accept_string('"}}\n</tool_call>')
    assert allowed(matcher)[0] == {"<|im_end|>"}


@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_letters_beyond_ascii_may_stand_before_hexadecimal_digits(form):
    values = ["café au lait", "éa", "ÿ1€a", "\\x61", "😀a", "\\éa", "éé0"]
    parameters = {"e": {"type": "string", "enum": values}, "éa": {"type": "string"}}
    function = {
        "name": "ñ0",
        "parameters": {"type": "dict", "properties": parameters, "required": ["e"]},
    }
    for value in values:
        calls = [{"ñ0": {"e": value, "éa": "x"}}]
        assert accepts([function], render(calls, form), form)
    assert not accepts([function], render([{"ñ0": {"e": "\u0e9a"}}], form), form)
