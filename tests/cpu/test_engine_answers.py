"""What an answer holds (text, bytes, notes, finish), and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import xgrammar as xgr

from baselines.snapkv import SnapKV
from pask.engine import decode
from pask.engine.decode import generate, new_store
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.errors import HarnessFault, PaskError
from pask.methods.contract import Captures, Placement, PromptInfo, RequestState
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.structure.automaton import END, TagGrammar, Unit, text
from pask.structure.ebnf import EbnfGrammar
from pask.structure.tags import Role, TokenClass
from pask.structure.tracker import Tracker
from tests.cpu.tiny import VOCAB_SIZE, tiny_folder
from tests.cpu.toys import (
    CALLS,
    EveryThird,
    EveryThirdState,
    SomeRequest,
    full,
    kept_tokens,
    toy_requests,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(tiny_folder(tmp_path_factory.mktemp("model"), "qwen3", seed=2)))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    return toy_requests(model)


def test_bytes_and_notes(model: LoadedModel, requests: list[SomeRequest]) -> None:
    request = requests[6]  # 42 prompt tokens
    methods = (("full", FullKV()), ("third", EveryThird()))
    whole, third = sorted(
        generate(model, [Task(request, methods)], Limits(9)), key=lambda g: g.entry
    )
    assert whole.finish == third.finish == "length"
    assert whole.prompt_tokens == 42
    assert whole.new_tokens == 9
    slot = 2 * 2 * model.layout.kv_heads * model.layout.head_dim * 2  # of both layers
    kept = kept_tokens(42, 2).shape[1]
    assert kept == 16
    # The last of 9 tokens was chosen, not fed: 8 decoded tokens are held; 42 + 8 > 48 slots.
    assert (whole.bytes.prompt, whole.bytes.decode) == (42 * slot, (64 - 42) * slot)
    assert (third.bytes.prompt, third.bytes.decode) == (16 * slot, 16 * slot)
    assert whole.bytes.full == third.bytes.full == 64 * slot
    # Choice n is made over n - 1 decoded tokens: 48 slots up to 6 of them, 64 beyond.
    assert whole.bytes.full_sum == whole.bytes.resident_sum == (7 * 48 + 2 * 64) * slot
    assert third.bytes.resident_sum == (16 + 8 * 32) * slot
    # Nothing is chosen by summaries: all that is resident is read, free slots of pages too.
    assert whole.bytes.read_sum == (7 * 48 + 2 * 64) * slot
    assert third.bytes.read_sum == (16 + 8 * 32) * slot
    assert (whole.notes, third.notes) == ((), ("toy",))


def test_a_state_gets_what_it_wants(model: LoadedModel, requests: list[SomeRequest]) -> None:
    states: list[EveryThirdState] = []

    class Watched(EveryThird):
        def open(self, info: PromptInfo) -> RequestState:
            states.append(EveryThirdState(info, self.window))
            return states[-1]

    methods = tuple((f"w{window}", Watched(window=window)) for window in (0, 3, 8))
    list(generate(model, [Task(requests[2], methods)], Limits(1)))
    prompt = len(requests[2].prompt_ids)
    for state, window in zip(states, (0, 3, 8), strict=True):
        assert len(state.seen) == model.layout.layers
        for captures in state.seen:
            mass = captures.window_mass
            if window == 0:
                assert mass is None
            else:
                assert mass is not None
                assert mass.shape == (model.layout.q_heads, prompt)
                assert mass.sum(1).tolist() == pytest.approx([window] * model.layout.q_heads)


def test_a_limit_of_one_and_a_prompt_of_one(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    request = SomeRequest("one", (7,), requests[0].grammar)
    (found,) = generate(model, full([request]), Limits(1))
    assert found.text in ("[", "[{", '[{"')
    assert (found.finish, found.prompt_tokens, found.new_tokens) == ("length", 1, 1)
    assert found.bytes.decode == 15 * found.bytes.prompt
    (longer,) = generate(model, full([request]), Limits(20))
    assert longer.text.startswith("[{")


def test_the_text_is_the_bytes_that_the_grammar_took(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    grammar = compiler.compile_grammar('root ::= "<tool_call>\\n  Zürich , 🐫 ! </tool_call>"')
    request = SomeRequest("text", requests[0].prompt_ids, grammar)
    (found,) = generate(model, full([request]), Limits(60))
    assert found.text == "<tool_call>\n  Zürich , 🐫 ! </tool_call>"
    assert found.text == model.tokenizer.decode(
        list(found.token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert found.finish == "stop"
    # Every matcher accepts the text again, and then nothing but the end.
    matcher = xgr.GrammarMatcher(grammar)
    assert matcher.accept_string(found.text)
    assert matcher.is_completed()


def test_an_answer_cut_by_the_limit_is_given_as_it_is(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    (found,) = generate(model, full(requests[:1]), Limits(5))
    assert (found.finish, found.new_tokens) == ("length", 5)
    assert found.text
    assert not found.text.endswith("]")


@pytest.mark.parametrize(
    ("prompt", "limit", "told"),
    [
        ((), 5, "bad: the prompt is empty"),
        ((5,) * 2000, 100, "bad: 2000 prompt tokens and up to 100 new ones do not fit"),
        ((5, VOCAB_SIZE), 5, "bad: a prompt token is outside the vocabulary"),
        ((5, -1), 5, "bad: a prompt token is outside the vocabulary"),
    ],
)
def test_prompts_that_cannot_be_read_name_their_request(
    model: LoadedModel,
    requests: list[SomeRequest],
    prompt: tuple[int, ...],
    limit: int,
    told: str,
) -> None:
    request = SomeRequest("bad", prompt, requests[0].grammar)
    with pytest.raises(PaskError) as caught:
        list(generate(model, full([request]), Limits(limit)))
    assert str(caught.value).startswith(told)


def test_a_grammar_of_another_vocabulary_is_told(model: LoadedModel) -> None:
    other = xgr.TokenizerInfo.from_huggingface(model.tokenizer, vocab_size=VOCAB_SIZE + 64)
    grammar = xgr.GrammarCompiler(other).compile_grammar('root ::= "a"')
    with pytest.raises(PaskError, match=f"compiled for {VOCAB_SIZE + 64} tokens"):
        list(generate(model, full([SomeRequest("r", (5,), grammar)]), Limits(5)))


def test_a_grammar_that_allows_nothing_is_a_fault_of_the_harness(model: LoadedModel) -> None:
    with pytest.raises(HarnessFault, match="no token is legal"):
        list(generate(model, full([SomeRequest("dead", (5, 6), unreachable())]), Limits(3)))


def unreachable() -> xgr.CompiledGrammar:
    """A grammar whose second byte no token of its vocabulary holds."""
    vocabulary = [b"a"] + [b""] * (VOCAB_SIZE - 1)
    info = xgr.TokenizerInfo.from_vocab_and_metadata(
        vocabulary,
        json.dumps(
            {
                "vocab_type": 0,
                "vocab_size": VOCAB_SIZE,
                "stop_token_ids": [2],
                "add_prefix_space": False,
            }
        ),
    )
    return xgr.GrammarCompiler(info).compile_grammar('root ::= "ab"')


def test_entries_of_a_task_must_differ(requests: list[SomeRequest]) -> None:
    with pytest.raises(ValueError, match="entry names"):
        Task(requests[0], (("a", FullKV()), ("a", FullKV())))
    with pytest.raises(ValueError, match="entry names"):
        Task(requests[0], ())


def test_finished_answers_leave_nothing_behind(
    model: LoadedModel, requests: list[SomeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more seats are taken than answers run at once, and one task that waits."""
    stores: list[KVStore] = []

    def watched(*args: Any, **kwargs: Any) -> KVStore:
        stores.append(new_store(*args, **kwargs))
        return stores[-1]

    monkeypatch.setattr(decode, "new_store", watched)
    methods = tuple((f"m{n}", FullKV()) for n in range(3))
    most = 0
    for _ in generate(model, [Task(r, methods) for r in requests], Limits(6), max_batch=3):
        (store,) = stores
        store.check()
        most = max(most, sum(seat is not None for seat in store.seats))
    assert 3 <= most <= 6
    assert not any(store.seats)
    assert not any(used for used, _ in store.pool_bytes().values())


class _Spoiler(EveryThirdState):
    """Writes into what it is shown."""

    def place(self, layer: int, captures: Captures) -> Placement:
        assert captures.window_mass is not None
        captures.window_mass.zero_()
        return Placement()


def test_a_method_cannot_spoil_what_another_one_is_shown(
    model: LoadedModel, requests: list[SomeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EveryThird, "open", lambda self, info: _Spoiler(info, self.window))
    snap = SnapKV(budget=0.4, window=2, min_tokens=4)
    seen: list[Captures] = []
    place = type(snap.open(PromptInfo(42, 2, 2, 2, 16))).place
    monkeypatch.setattr(
        type(snap.open(PromptInfo(42, 2, 2, 2, 16))),
        "place",
        lambda self, layer, captures: (seen.append(captures), place(self, layer, captures))[1],
    )
    methods = (("spoiler", EveryThird(window=2)), ("snapkv", snap))
    list(generate(model, [Task(requests[6], methods)], Limits(2)))
    assert [float(c.window_mass.sum()) for c in seen if c.window_mass is not None] == [
        pytest.approx(2 * model.layout.q_heads)
    ] * 2


class _Faulty(EveryThirdState):
    def place(self, layer: int, captures: Captures) -> Placement:
        return self.answer  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, "place must answer Placement, not NoneType"),
        (Placement.high([[0]]), r"HIGH tokens must be int64 \[kv_heads=2, n\]"),
        (Placement.high(torch.zeros(2, 0, dtype=torch.int64)), "must keep at least one token"),
        (Placement.high(torch.tensor([[1, 0], [0, 1]])), "tokens must ascend"),
        (Placement.high(torch.tensor([[0, 99], [0, 1]])), "token outside 0"),
        (Placement({Level.LOW4: torch.zeros(2, 1, dtype=torch.int64)}), "not among the state's"),
    ],
)
def test_a_method_that_breaks_the_contract_is_one_line(
    model: LoadedModel,
    requests: list[SomeRequest],
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    expected: str,
) -> None:
    monkeypatch.setattr(_Faulty, "answer", answer, raising=False)
    monkeypatch.setattr(EveryThird, "open", lambda self, info: _Faulty(info, 0))
    with pytest.raises(HarnessFault, match=rf"bad, row .*, layer 0: the method failed.*{expected}"):
        list(generate(model, [Task(requests[6], (("bad", EveryThird()),))], Limits(2)))


def test_a_tag_grammar_of_other_texts_is_a_fault_of_the_harness(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    other = TagGrammar(text(b"no", Unit(TokenClass.SCAFFOLD, Role.LAYOUT), END))
    request = SomeRequest("two", requests[0].prompt_ids, requests[0].grammar, other)
    with pytest.raises(HarnessFault, match=r"full, row two.*tag grammar refused b'\["):
        list(generate(model, full([request]), Limits(3)))


def test_a_request_without_a_tag_grammar_has_no_tags(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    (found,) = generate(model, full(requests[:1]), Limits(3))
    assert found.tags == ()


def test_any_grammar_that_yields_tags_is_followed_while_decoding(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    roles = {
        "name": (TokenClass.FUNCTION_NAME, Role.FUNCTION_SELECTOR),
        "value": (TokenClass.STRING, Role.REQUIRED_VALUE),
    }
    tagged = replace(requests[0], tag_grammar=EbnfGrammar(CALLS, roles))
    (found,) = generate(model, full([tagged]), Limits(40))
    assert len(found.tags) == found.new_tokens
    tracker = Tracker(EbnfGrammar(CALLS, roles))
    vocabulary = tokenizer_info(model).decoded_vocab
    assert found.tags == tuple(tracker.accept(vocabulary[token]) for token in found.token_ids)
    assert Role.FUNCTION_SELECTOR in {tag.role for tag in found.tags}
