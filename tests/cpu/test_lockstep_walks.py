"""Random answers under two real tokenizers' masks, and whole masks against the tracker."""

from __future__ import annotations

import itertools
import random

import pytest
import xgrammar as xgr

from pask.bench.lockstep import SECOND_WAY, Walker, tracker_takes
from pask.bfcl.answers import ANSWER_FORMS
from pask.bfcl.data import CATEGORIES, load_rows
from pask.bfcl.tag_grammar import tag_grammar
from pask.errors import HarnessFault
from pask.structure.tracker import Tracker
from pask.structure.xgrammar_states import Mask
from tests.cpu.tokenizers_real import real_tokenizer

TOKENS, SLOW_TOKENS = 120_000, 1_000_000  # with each tokenizer
WALKS = 4  # a row and form
MASKS = 20  # whole masks that are compared

TOKENIZERS = ("smollm2", "qwen")
CASES = list(itertools.product(ANSWER_FORMS, CATEGORIES))


def walks(tokenizer: str, tokens: int, seed: int) -> Walker:
    """Walk so many tokens at least, and at least once in every category and form."""
    walker = Walker(real_tokenizer(tokenizer).info, random.Random(seed))
    rows = list(load_rows().values())
    for turn, (form, category) in enumerate(itertools.cycle(CASES)):
        if turn >= len(CASES) and walker.tokens >= tokens:
            return walker
        row = walker.random.choice([row for row in rows if row.category == category])
        second_way = walker.random.random() < SECOND_WAY
        subject = walker.subject(row, form, second_way=second_way)
        for _ in range(WALKS):
            walker.walk(subject)
    raise AssertionError("unreachable")


def check(walker: Walker) -> None:
    assert walker.ended > 10
    assert walker.probes > 2 * walker.tokens
    assert walker.second_way_tokens > 0.05 * walker.tokens


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_random_answers_keep_masks_tracker_and_second_way_in_lockstep(tokenizer: str) -> None:
    check(walks(tokenizer, TOKENS, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_many_random_answers_keep_masks_tracker_and_second_way_in_lockstep(tokenizer: str) -> None:
    walker = walks(tokenizer, SLOW_TOKENS, seed=2)
    print(tokenizer, walker.tokens, "tokens,", walker.second_way_tokens, "the second way")
    check(walker)


def test_a_tag_grammar_that_is_not_the_masks_is_a_fault_that_names_the_row() -> None:
    rows = load_rows()
    walker = Walker(real_tokenizer("smollm2").info, random.Random(0))
    subject = walker.subject(rows["simple_python_0"], "json_list")
    subject.grammar = tag_grammar(rows["simple_python_1"].functions, "json_list")
    with pytest.raises(HarnessFault, match=r"row simple_python_0, json_list: .*after b'\[.*xgram"):
        walker.walk(subject)


def test_a_tag_that_the_second_way_does_not_give_is_a_fault() -> None:
    row = load_rows()["simple_python_0"]
    walker = Walker(real_tokenizer("smollm2").info, random.Random(0))
    subject = walker.subject(row, "json_list", second_way=True)
    # The same texts for legal, with all arguments optional's roles: only tags can differ.
    relaxed = [{**f, "parameters": {**f["parameters"], "required": []}} for f in row.functions]
    subject.grammar = tag_grammar(relaxed, "json_list")
    subject.compiled = walker.compilers["json_list"].compile_unchecked(relaxed)
    subject.byte_compiled = walker.byte_compilers["json_list"].compile_unchecked(relaxed)
    with pytest.raises(HarnessFault, match="by xgrammar's states"):
        walker.walk(subject)


def test_whole_masks_are_what_the_tracker_takes() -> None:
    """Every token of the vocabulary, at states along random answers."""
    info = real_tokenizer("smollm2").info
    texts, stops = info.decoded_vocab, set(info.stop_token_ids)
    walker = Walker(info, random.Random(5))
    rows = list(load_rows().values())
    mask, sizes = Mask(info.vocab_size), set()
    for turn in range(MASKS):
        form, category = CASES[turn % len(CASES)]
        row = walker.random.choice([row for row in rows if row.category == category])
        subject = walker.subject(row, form)
        written = walker.walk(subject, 60)
        cut = walker.random.randrange(len(written) + 1)
        matcher, tracker = xgr.GrammarMatcher(subject.compiled), Tracker(subject.grammar)
        if cut:
            assert matcher.accept_string(written[:cut])
            tracker.accept(written[:cut])
        bits = mask.read(matcher)
        sizes.add(int(bits.sum()))
        for token, text in enumerate(texts):
            if token in stops:
                takes = tracker.can_end
            else:  # a control token has no text and is legal nowhere
                takes = bool(text) and tracker_takes(tracker, text)
            assert takes == bits[token], (subject.where, written[:cut], token, text)
    assert min(sizes) == 1
    assert max(sizes) > 10_000
