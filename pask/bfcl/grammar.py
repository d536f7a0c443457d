"""Grammars of the two answer forms, compiled by xgrammar for one tokenizer.

Both forms are built around the same grammar of one call, so they hold the same calls: one or more,
of any of the row's functions, keys in the order of the documents, JSON layout fixed. How many calls
an answer holds is the model's decision in every category.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import xgrammar as xgr
from xgrammar.structural_tag import GrammarFormat, TagFormat, TagsWithSeparatorFormat

from pask.bfcl.answers import (
    ANSWER_FORMS,
    BLOCK_BEGIN,
    BLOCK_END,
    BLOCK_SEPARATOR,
    SEPARATORS,
    Call,
    check_answer_form,
    render,
)
from pask.bfcl.schema import JsonSchema, any_call_schema, arguments_schema, calls_schema
from pask.errors import PaskError
from pask.structure.byte_vocabulary import byte_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ANSWER_FORMS", "GrammarCompiler", "accepts", "tokenizer_info"]

_CACHE_BYTES = 256 * 2**20
# Names that GGUF files give to the unused rows of a padded vocabulary.
_PADDING = re.compile(rb"\[PAD\d+\]")


def tokenizer_info(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop_token_ids: Sequence[int]
) -> xgr.TokenizerInfo:
    """xgrammar's view of a tokenizer, `vocab_size` being the model's number of logits.

    Control tokens (`special` in the tokenizer) and padding rows get no text: xgrammar would
    otherwise take their names as text, legal inside any JSON string. Tokens that are text with a
    meaning, such as Qwen's `<tool_call>`, are not `special` and stay.
    """
    plain = xgr.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_token_ids)
    )
    control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = [
        b"" if i in control or _PADDING.fullmatch(text) else text
        for i, text in enumerate(plain.decoded_vocab)
    ]
    return xgr.TokenizerInfo(
        texts,
        xgr.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(stop_token_ids),
        add_prefix_space=plain.add_prefix_space,
    )


class GrammarCompiler:
    """Compiles rows' grammars for one tokenizer and one answer form; equal tool sets once."""

    def __init__(self, info: xgr.TokenizerInfo, answer_form: str, *, max_threads: int = 1) -> None:
        self.answer_form = check_answer_form(answer_form)
        self._compiler = xgr.GrammarCompiler(
            info, max_threads=max_threads, cache_enabled=True, cache_limit_bytes=_CACHE_BYTES
        )

    def compile(self, row_id: str, functions: Sequence[Mapping[str, Any]]) -> xgr.CompiledGrammar:
        """The grammar of a row's answers.

        Raises PaskError naming the row where the documents cannot be converted, xgrammar refuses
        the schema, or the compiled grammar does not hold the calls that the schema describes.
        """
        where = f"row {row_id}"
        try:
            compiled = self.compile_unchecked(functions)
        except PaskError as error:
            raise PaskError(
                error.what, where=f"{where}, {error.where}", why=error.why, todo=error.todo
            ) from error
        except (RuntimeError, ValueError) as error:
            raise PaskError(
                "xgrammar cannot compile the row's functions", where=where, why=str(error)
            ) from error
        for text, legal in _witnesses(functions, self.answer_form):
            if _holds(compiled, text) != legal:
                raise PaskError(
                    "the compiled grammar is not the schema's",
                    where=where,
                    why=f"it {'refuses' if legal else 'allows'} {text!r}",
                    todo="check the xgrammar version",
                )
        return compiled

    def compile_unchecked(self, functions: Sequence[Mapping[str, Any]]) -> xgr.CompiledGrammar:
        """xgrammar's own work alone; RuntimeError or ValueError where it refuses."""
        if self.answer_form == "json_list":
            return self._compiler.compile_json_schema(
                calls_schema(functions), any_whitespace=False, separators=SEPARATORS
            )
        # xgrammar's tag has no fixed layout for a JSON Schema (its white space is 0..n), so the tag
        # gets the very grammar that the list form makes of one call.
        call = xgr.Grammar.from_json_schema(
            any_call_schema(functions), any_whitespace=False, separators=SEPARATORS
        )
        content = GrammarFormat(grammar=fixed_width(str(call)))
        block = TagFormat(begin=BLOCK_BEGIN, content=content, end=BLOCK_END)
        blocks = TagsWithSeparatorFormat(tags=[block], separator=BLOCK_SEPARATOR, at_least_one=True)
        return self._compiler.compile_structural_tag(xgr.StructuralTag(format=blocks))


def fixed_width(grammar: str) -> str:
    r"""The same grammar with `\u` escapes for `\x` ones, which have no fixed length: xgrammar
    prints "éa" as `\xe9a` and reads that back as one character."""
    return re.sub(r"\\(?:x([0-9a-f]{2})|.)", lambda m: f"\\u00{m[1]}" if m[1] else m[0], grammar)


def accepts(functions: Sequence[Mapping[str, Any]], text: str, answer_form: str) -> bool:
    """Whether `text` is a whole answer that the grammar of these functions allows.

    Uses a byte vocabulary, so it holds for every tokenizer. Raises PaskError as compiling does.
    """
    return _holds(_byte_grammar(json.dumps(functions), check_answer_form(answer_form)), text)


@lru_cache(maxsize=128)
def _byte_grammar(functions: str, answer_form: str) -> xgr.CompiledGrammar:
    return _byte_compiler(answer_form).compile("(given functions)", json.loads(functions))


@cache
def _byte_compiler(answer_form: str) -> GrammarCompiler:
    return GrammarCompiler(byte_vocabulary(), answer_form)


def _holds(compiled: xgr.CompiledGrammar, text: str) -> bool:
    matcher = xgr.GrammarMatcher(compiled)
    return matcher.accept_string(text.encode()) and matcher.is_completed()


def _witnesses(functions: Sequence[Mapping[str, Any]], answer_form: str) -> list[tuple[str, bool]]:
    """Texts and whether a sound grammar holds them: each function alone with its required
    arguments and with all of them, and all functions in one answer, are legal; nothing at all,
    text after the answer and a function of another name are not."""
    calls: list[Call] = [
        {function["name"]: _value(arguments_schema(function), every)}
        for function in functions
        for every in (False, True)
    ]
    legal = [render([call], answer_form) for call in calls] + [render(calls, answer_form)]
    stranger: Call = {" ".join(function["name"] for function in functions) + " too": {}}
    illegal = ["", legal[0] + " ", render([stranger], answer_form)]
    return [(text, True) for text in legal] + [(text, False) for text in illegal]


def _value(schema: JsonSchema, every: bool) -> Any:
    if "enum" in schema:
        return schema["enum"][-1]
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        chosen = properties if every else schema.get("required", ())
        return {name: _value(properties[name], every) for name in chosen}
    if kind == "array":
        return [_value(schema["items"], every)] if every and "items" in schema else []
    return {"string": "a", "integer": -1, "number": 0.5, "boolean": True, None: None}[kind]
