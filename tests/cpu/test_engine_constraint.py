"""The masks."""

from __future__ import annotations

import pytest
import torch
import xgrammar as xgr

from pask.engine.constraint import LegalTokens, best
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from tests.cpu.tiny import VOCAB_SIZE, tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(tiny_folder(tmp_path_factory.mktemp("model"), "qwen3", seed=2)))


def test_equal_logits_go_to_the_lowest_id(model: LoadedModel) -> None:
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    matcher = xgr.GrammarMatcher(compiler.compile_grammar("root ::= [a-f]"))
    legal = LegalTokens([matcher] * 3, VOCAB_SIZE)
    assert legal.counts == [6, 6, 6]
    a, c = (model.tokenizer.convert_tokens_to_ids(letter) for letter in "ac")
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, c:] = 1.0
    assert best([legal.mask(0), legal.mask(2)], logits, ["a", "c"]) == [a, c]


def test_the_only_legal_token(model: LoadedModel) -> None:
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    grammar = compiler.compile_grammar("root ::= [a-zA-Z\\x7f]")
    matcher = xgr.GrammarMatcher(grammar)
    for letter in "Aaz":
        token = model.tokenizer.convert_tokens_to_ids(letter)
        assert matcher.accept_token(token)
        legal = LegalTokens([matcher], VOCAB_SIZE)
        assert (legal.counts, legal.only(0)) == ([1], 2)
        matcher.rollback(1)


@pytest.mark.parametrize("token", [0, 31, 32, 63, 500])
def test_only_reads_every_bit_of_a_mask(token: int) -> None:
    legal = LegalTokens.__new__(LegalTokens)
    mask = torch.zeros(1, 17, dtype=torch.int64)
    mask[0, token // 32] = 1 << token % 32
    legal._words = mask.numpy().astype("uint32")
    assert legal.only(0) == token
