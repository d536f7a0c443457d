"""A row made ready for the engine: prompt token ids, and the grammar of its answers twice: as
xgrammar's masks and as structural tags."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import xgrammar as xgr

from pask.bfcl.data import Row
from pask.bfcl.grammar import GrammarCompiler
from pask.bfcl.prompts import build_prompt, style_named
from pask.bfcl.tag_grammar import tag_grammar
from pask.errors import PaskError
from pask.structure.automaton import TagGrammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Request:
    """One item of work for the engine.

    `prompt_ids`: token ids of the whole prompt, special tokens included; `grammar`: compiled for
    the tokenizer that made them; `tag_grammar`: the same answers, for a `Tracker`.
    """

    id: str
    category: str
    cluster: str
    prompt_ids: tuple[int, ...]
    prompt_text: str
    grammar: xgr.CompiledGrammar
    tag_grammar: TagGrammar

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise PaskError("the prompt has no tokens", where=f"row {self.id}")

    @cached_property
    def prompt_digest(self) -> str:
        """Hex SHA-256 of the prompt ids, written in decimal with commas between."""
        return hashlib.sha256(",".join(map(str, self.prompt_ids)).encode()).hexdigest()


class RequestBuilder:
    """Builds requests for one tokenizer, prompt style and answer form."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tokenizer_info: xgr.TokenizerInfo,
        prompt_style: str,
        answer_form: str,
    ) -> None:
        style_named(prompt_style)
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer_info, answer_form)
        self.prompt_style = prompt_style
        self.answer_form = answer_form

    def build(self, row: Row) -> Request:
        """The row's request; PaskError naming the row where prompt or grammar cannot be made."""
        prompt = build_prompt(row, self._tokenizer, self.prompt_style, self.answer_form)
        # The template has written every special token that the model wants.
        ids = self._tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        return Request(
            id=row.id,
            category=row.category,
            cluster=row.cluster,
            prompt_ids=tuple(ids),
            prompt_text=prompt.text,
            grammar=self._compiler.compile(row.id, row.functions),
            tag_grammar=tag_grammar(row.functions, self.answer_form),
        )
