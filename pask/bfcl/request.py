"""A row made ready for the engine: prompt token ids with their labels, and the grammar of its
answers twice: as xgrammar's masks and as structural tags."""

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
from pask.structure.labels import Label
from pask.structure.token_text import TokenText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Request:
    """One item of work for the engine.

    `prompt_ids`: token ids of the whole prompt, special tokens included; `prompt_labels`: what each
    of them is; `grammar`: compiled for the tokenizer that made them; `tag_grammar`: the same
    answers, for a `Tracker`.
    """

    id: str
    category: str
    cluster: str
    prompt_ids: tuple[int, ...]
    prompt_labels: tuple[Label, ...]
    prompt_text: str
    grammar: xgr.CompiledGrammar
    tag_grammar: TagGrammar

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise PaskError("the prompt has no tokens", where=f"row {self.id}")
        if len(self.prompt_labels) != len(self.prompt_ids):
            raise ValueError(f"row {self.id}: every prompt token has one label")

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
        self._token_text = TokenText(tokenizer_info.decoded_vocab, tokenizer.added_tokens_decoder)
        self._compiler = GrammarCompiler(tokenizer_info, answer_form)
        self.prompt_style = prompt_style
        self.answer_form = answer_form

    def build(self, row: Row) -> Request:
        """The row's request; PaskError naming the row where prompt or grammar cannot be made."""
        text, ids, labels = self.prompt(row)
        return Request(
            id=row.id,
            category=row.category,
            cluster=row.cluster,
            prompt_ids=ids,
            prompt_labels=labels,
            prompt_text=text,
            grammar=self._compiler.compile(row.id, row.functions),
            tag_grammar=tag_grammar(row.functions, self.answer_form),
        )

    def prompt(self, row: Row) -> tuple[str, tuple[int, ...], tuple[Label, ...]]:
        """The prompt's text, its token ids and their labels, without the grammar; errors as above.

        PaskError too where the tokenizer loses some of the text, so that labels would be guesses.
        """
        prompt = build_prompt(row, self._tokenizer, self.prompt_style, self.answer_form)
        # The template has written every special token that the model wants.
        ids = tuple(self._tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
        try:
            labels = self._token_text.labels([(p.label, p.text) for p in prompt.pieces], ids)
        except PaskError as error:
            raise PaskError(
                error.what, where=f"row {row.id}", why=error.why, todo=error.todo
            ) from error
        return prompt.text, ids, labels
