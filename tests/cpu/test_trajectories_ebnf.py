"""The grammar that another engine gets as EBNF text is the one that was compiled here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import xgrammar as xgr

from pask.bfcl.answers import ANSWER_FORMS, render
from pask.bfcl.data import CATEGORIES, load_rows
from pask.bfcl.grammar import GrammarCompiler, tokenizer_info
from pask.engine.layout import ModelLayout, Rope
from pask.peers.vllm import ebnf, kv_bytes
from tests.cpu.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.null.documents import document

# Names and values that xgrammar prints as escapes, some before what could be read as more of them.
ESCAPES = document(
    "ñ0", [], éa={"type": "string", "enum": ["éa", "ÿ1€a", "\\x61", "😀a", "\\éa", 'a"#//', "é0"]}
)


def tool_sets() -> list[tuple[Mapping[str, Any], ...]]:
    rows = load_rows()
    chosen = [next(row for row in rows.values() if row.category == c) for c in CATEGORIES]
    return [*(row.functions for row in chosen), (ESCAPES,)]


def legal(mask: Any) -> list[int]:
    words = mask[0].tolist()
    return [i for i in range(VOCAB_SIZE) if words[i // 32] >> (i % 32) & 1]


@pytest.mark.parametrize("form", ANSWER_FORMS)
@pytest.mark.parametrize("number", range(len(CATEGORIES) + 1))
def test_every_step_of_a_walk_has_the_same_mask(form: str, number: int) -> None:
    info = tokenizer_info(tiny_tokenizer(), VOCAB_SIZE, [2])
    compiled = GrammarCompiler(info, form).compile("a row", tool_sets()[number])
    again = xgr.GrammarCompiler(info, max_threads=1).compile_grammar(ebnf(compiled))
    masks = [xgr.allocate_token_bitmask(1, VOCAB_SIZE) for _ in range(2)]
    quote = [i for i, text in enumerate(info.decoded_vocab) if text == b'"']
    ended = 0
    for seed in range(6):
        draw = random.Random(seed)
        matchers = [xgr.GrammarMatcher(g) for g in (compiled, again)]
        for _ in range(150):
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.fill_next_token_bitmask(mask)
            choices = legal(masks[0])
            assert choices == legal(masks[1])
            # A string is left soon, so that the walk sees the rest of the grammar too.
            out = [i for i in choices if i in (*quote, 2)]
            token = draw.choice(out if out and draw.random() < 0.4 else choices)
            assert all(matcher.accept_token(token) for matcher in matchers)
            if matchers[0].is_terminated():
                ended += 1
                break
    assert ended or number < len(CATEGORIES)


@pytest.mark.parametrize("form", ANSWER_FORMS)
def test_escapes_survive(form: str) -> None:
    info = tokenizer_info(tiny_tokenizer(), VOCAB_SIZE, [2])
    compiled = GrammarCompiler(info, form).compile("a row", [ESCAPES])
    again = xgr.GrammarCompiler(info, max_threads=1).compile_grammar(ebnf(compiled))

    def holds(text: str) -> bool:
        matcher = xgr.GrammarMatcher(again)
        return matcher.accept_string(text.encode()) and matcher.is_completed()

    values: Sequence[str] = ESCAPES["parameters"]["properties"]["éa"]["enum"]
    for value in values:
        assert holds(render([{"ñ0": {"éa": value}}], form)), value
        assert not holds(render([{"ñ0": {"éa": value + "0"}}], form))
    assert holds(render([{"ñ0": {}}, {"ñ0": {}}], form))


def test_the_pool_holds_the_longest_request_and_no_more_than_needed() -> None:
    def layout(layers: int) -> ModelLayout:
        return ModelLayout(
            "qwen3", layers, 64, 96, 4, 2, 32, 520, 2048, 1e-6, Rope(1e4), True, False, True
        )

    token = 2 * 2 * 32 * 4  # key and value, heads, channels, bytes; one layer
    assert kv_bytes(layout(1), 1000, 1) == 2**28  # small ones get a quarter of a GiB
    for longest, batch in ((1000, 32), (40_000, 4), (1_000_000, 1)):
        need = 28 * token * longest
        given = kv_bytes(layout(28), longest, batch)
        assert given >= need
        assert given <= max(2**28, 1.5 * need * batch)
        assert given <= max(2**32, 1.1 * need)
