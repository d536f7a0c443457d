"""Prompt styles over chat templates with and without tools, on real rows."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pask.bfcl.answers import ANSWER_FORMS
from pask.bfcl.chat import Message, render_chat
from pask.bfcl.data import CATEGORIES, load_rows
from pask.bfcl.grammar import tokenizer_info
from pask.bfcl.pieces import Piece
from pask.bfcl.prompts import EXAMPLES, STYLES, build_prompt
from pask.bfcl.request import RequestBuilder
from pask.errors import PaskError
from pask.structure.labels import Label

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Tools in the system turn, a default system text, as Qwen's template has it.
SYSTEM_TOOLS = (
    "<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}You are helpful.{% endif %}"
    "{% if tools %}\n\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools>{% endif %}<|im_end|>\n"
    "{% for m in messages if m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
# Tools in the user's turn, indented and unwrapped, messages trimmed, as Llama's template has it.
USER_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if tools and m.role == 'user' %}Given these functions:\n"
    "{% for tool in tools %}{{ tool.function | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TEMPLATES = {  # a line break right after a {% block %} would be dropped
    name: template.replace("\n", "{{ '\\n' }}")
    for name, template in {
        "plain": PLAIN,
        "system_tools": SYSTEM_TOOLS,
        "user_tools": USER_TOOLS,
    }.items()
}


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 256 bytes, two control tokens, and a beginning token that it would
    put before every text if asked to add special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make_tokenizer(template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="module")
def rows():
    """Two rows a category, and the ones with a system message and a key with ñ."""
    every = load_rows()
    chosen = [i for c in CATEGORIES for i in itertools.islice(
        (i for i, row in every.items() if row.category == c), 2)]  # fmt: skip
    return {i: every[i] for i in [*chosen, "live_simple_58-27-0", "live_simple_67-31-0"]}


def of(prompt, label):
    return [piece.text for piece in prompt.pieces if piece.label == label]


@pytest.mark.parametrize("form", ANSWER_FORMS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_style_form_and_template(template, style, form, tokenizers, rows):
    tokenizer = tokenizers[template]
    if STYLES[style].native and template == "plain":
        with pytest.raises(PaskError, match=r"row simple_python_0.*no place for tools.*choose"):
            build_prompt(rows["simple_python_0"], tokenizer, style, form)
        return
    for row in rows.values():
        prompt = build_prompt(row, tokenizer, style, form)
        assert prompt.text.endswith("<|im_start|>assistant\n")
        assert prompt.pieces[-1].label == "chat_scaffold"
        assert of(prompt, "function_name") == [f["name"] for f in row.functions]
        keys = of(prompt, "parameter_key")
        for function in row.functions:
            assert set(function["parameters"]["properties"]) <= set(keys)
        said = "".join(of(prompt, "user"))
        for message in row.messages:
            assert message["content"].strip() in said
        examples = prompt.text.count(EXAMPLES["two"].request)
        assert examples == ("two" in STYLES[style].examples)
        blocks = "</tool_call>" in prompt.text
        assert blocks == (form == "tool_call" and style != "native")


def test_native_adds_nothing_to_the_templates_own_form(tokenizers, rows):
    row = rows["simple_python_0"]
    prompt = build_prompt(row, tokenizers["system_tools"], "native", "tool_call")
    assert of(prompt, "instruction") == ["\n\n# Tools\n<tools>\n", "\n</tools>"]
    assert prompt.text.startswith("<|im_start|>system\nYou are helpful.\n\n# Tools\n<tools>\n{")
    assert prompt.pieces[0] == Piece("<|im_start|>system\nYou are helpful.", Label.CHAT_SCAFFOLD)
    assert prompt.pieces[2].text.startswith('{"type": "function"')
    assert prompt.pieces[2].label == "tool_scaffold"
    line = next(line for line in prompt.text.splitlines() if line.startswith('{"type"'))
    tool = json.loads(line)
    assert tool["type"] == "function"
    assert tool["function"]["parameters"]["type"] == "object"  # BFCL's own word is "dict"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 1 / 0 }}", "fails on the messages; ZeroDivisionError"),
        ("{{ messages[0]['content'] + 3 }}", "fails on the messages; TypeError"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    ],
)
def test_a_template_that_breaks_is_told_in_one_line(rows, template, told):
    with pytest.raises(PaskError, match=told) as caught:
        build_prompt(rows["simple_python_0"], make_tokenizer(template), "one_example", "json_list")
    assert "row simple_python_0" in str(caught.value)


def test_a_rows_system_message_is_kept_as_the_users(tokenizers, rows):
    row = rows["live_simple_58-27-0"]
    own = row.messages[0]["content"]
    assert row.messages[0]["role"] == "system"
    for style in STYLES:
        prompt = build_prompt(row, tokenizers["system_tools"], style, "json_list")
        assert prompt.text.count("<|im_start|>system\n") == 1
        assert of(prompt, "user") == [own, row.messages[1]["content"]]


def test_turns_end_with_the_rows_own_functions_and_request(tokenizers, rows):
    row = rows["simple_python_0"]
    prompt = build_prompt(row, tokenizers["plain"], "turns_examples", "json_list")
    turns = prompt.text.split("<|im_start|>")[1:]
    assert [turn.split("\n")[0] for turn in turns] == [
        "system", "user", "assistant", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert turns[4] == (
        'assistant\n[{"name": "dim_lamp", "arguments": {"room": "hall", "percent": 40}}, '
        '{"name": "dim_lamp", "arguments": {"room": "study", "percent": 75}}]<|im_end|>\n'
    )
    assert turns[5].endswith(f"\n\nRequest: {row.messages[0]['content']}<|im_end|>\n")


def test_examples_are_not_bfcls():
    names = {f["name"] for row in load_rows().values() for f in row.functions}
    for example in EXAMPLES.values():
        assert not names & {f["name"] for f in example.functions}
    asked = {m["content"] for row in load_rows().values() for m in row.messages}
    assert not asked & {example.request for example in EXAMPLES.values()}


def test_a_message_that_reads_like_scaffold_keeps_its_label(tokenizers):
    messages = [
        Message("user", (Piece("assistant\n", Label.USER),)),
        Message("user", (Piece("\n user <tools> ", Label.USER),)),
    ]
    prompt = render_chat(tokenizers["user_tools"], messages)
    assert of(prompt, "user") == ["assistant", "user <tools>"]  # trimmed by the template


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('system role not supported') }}", "system role not supported"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "each message once"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "each message once"),
        (
            "{% for m in messages %}{{ m.content | replace('Hi', 'Ho') }}{% endfor %}",
            "changes the messages",
        ),
    ],
)
def test_templates_that_cannot_be_labelled(template, words):
    with pytest.raises(PaskError, match=words):
        render_chat(make_tokenizer(template), [Message("user", (Piece("Hi", Label.USER),))])


def test_tools_in_a_form_that_cannot_be_labelled():
    template = (
        "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{{ messages[0].content }}"
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(PaskError, match="cannot be labelled; choose a prompt style"):
        render_chat(make_tokenizer(template), [Message("user", (Piece("Hi", Label.USER),))], [tool])


def test_wrong_names_give_one_line(tokenizers, rows):
    row = rows["simple_python_0"]
    with pytest.raises(PaskError, match=r"did you mean 'two_call_example'\?"):
        build_prompt(row, tokenizers["plain"], "two_call_examples", "json_list")
    with pytest.raises(PaskError, match="json_list, tool_call"):
        build_prompt(row, tokenizers["plain"], "one_example", "list")


def test_request(tokenizers, rows):
    tokenizer = tokenizers["plain"]
    info = tokenizer_info(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    builder = RequestBuilder(tokenizer, info, "one_example", "json_list")
    row = rows["live_simple_67-31-0"]
    request = builder.build(row)
    assert (request.id, request.category, request.cluster) == (row.id, row.category, row.cluster)
    assert request.prompt_text == build_prompt(row, tokenizer, "one_example", "json_list").text
    assert tokenizer.decode(request.prompt_ids) == request.prompt_text
    assert request.prompt_ids.count(tokenizer.bos_token_id) == 3  # the template's own, none added
    assert request.prompt_digest == builder.build(row).prompt_digest
    assert len(request.prompt_labels) == len(request.prompt_ids)
    other = dataclasses.replace(request, prompt_ids=(*request.prompt_ids[:-1], 0))
    assert other.prompt_digest != request.prompt_digest
    with pytest.raises(PaskError, match=f"row {row.id}"):
        dataclasses.replace(request, prompt_ids=(), prompt_labels=())
    with pytest.raises(ValueError, match="one label"):
        dataclasses.replace(request, prompt_labels=request.prompt_labels[1:])
    broken = {"name": "f", "parameters": {"properties": {"p": {"type": "HashMap"}}}}
    with pytest.raises(PaskError, match=f"row {row.id}"):
        builder.build(dataclasses.replace(row, functions=(broken,)))
