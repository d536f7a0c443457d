"""Replay against decoding token by token: the same answers, bytes and notes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xgrammar as xgr

from baselines.snapkv import SnapKV
from pask.engine.decode import generate, new_store
from pask.engine.generation import Generation, Limits, Task
from pask.engine.kv_store import KVStore, Seat
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.engine.replay import Replayed, Replayer
from pask.engine.replay_job import Asked, GiveUp
from pask.engine.trace import Trace
from pask.errors import PaskError
from pask.methods.contract import Method
from pask.methods.full import FullKV
from pask.methods.levels import Level
from tests.cpu.policies import ByToken
from tests.cpu.tiny import LAYOUTS, tiny_folder
from tests.cpu.toys import SomeRequest, full, toy_requests

LIMITS = Limits(30)
LAYERS = 4
EVERY = tuple(range(LAYERS))
MIXED = (Level.RELEASE, Level.LOW4, Level.HIGH)
WIDTHS = (Level.LOW2, Level.LOW3, Level.LOW4, Level.LOW8, Level.HIGH)

POLICIES: dict[str, Method] = {
    "full": FullKV(),
    "all layers": ByToken(1.0, 1, MIXED, EVERY),
    "a window": ByToken(1.0, 2, MIXED, EVERY, recent=5),
    "a long window": ByToken(1.0, 3, MIXED, EVERY, recent=20),
    "an upper layer": ByToken(1.0, 4, (Level.RELEASE, Level.LOW2), (2,), recent=2),
    "the top layer": ByToken(1.0, 5, (Level.LOW4,), (3,), recent=1),
    "all widths": ByToken(1.0, 6, WIDTHS, EVERY, recent=3),
    "plain keys": ByToken(1.0, 7, (Level.LOW2, Level.LOW4), EVERY, recent=1, shifted_keys=False),
    "prompt": ByToken(1.0, 8, (Level.HIGH,), EVERY, prompt=(Level.RELEASE, Level.LOW4, Level.HIGH)),
    "prompt and answer": ByToken(1.0, 9, MIXED, (1, 2), recent=4, prompt=(Level.LOW4, Level.LOW8)),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"head_dim": 32, "num_hidden_layers": LAYERS}
    return tiny_folder(tmp_path_factory.mktemp("model"), request.param, seed=2, **shape)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    return toy_requests(model)[1::2]


@pytest.fixture(scope="module")
def answers(model: LoadedModel, requests: list[SomeRequest]) -> dict[str, Generation]:
    return {found.request_id: found for found in generate(model, full(requests), LIMITS)}


@pytest.fixture
def store(model: LoadedModel) -> Iterator[KVStore]:
    store = new_store(model, seats=40, capacity_tokens=8192)
    yield store
    store.check()
    assert not any(store.seats)


def test_replay_is_decoding_token_by_token(
    model: LoadedModel,
    requests: list[SomeRequest],
    answers: dict[str, Generation],
    store: KVStore,
) -> None:
    """8 requests under 10 policies in each of three layouts."""
    replayer = Replayer(model, store, LIMITS)
    methods = tuple(POLICIES.items())
    outcomes = {"same": 0, "other": 0}
    for request in requests:
        task = Task(request, methods)
        # One token a step, and one answer a batch: nothing of runs or batches enters.
        decoded = {
            found.entry: found
            for found in generate(model, [task], LIMITS, max_batch=1, longest_run=1)
        }
        known = answers[request.id]
        trace = replayer.trace(task, known.token_ids)
        for one in replayer.replay(trace, methods, max_batch=4):
            assert one.generation == decoded[one.generation.entry]
            differs = one.generation.token_ids != known.token_ids
            assert (one.first_difference is not None) == differs
            outcomes["other" if differs else "same"] += 1
        replayer.free(trace)
    assert sum(outcomes.values()) == 80
    assert min(outcomes.values()) > 10  # both ways were gone


def test_runs_of_forced_tokens_change_nothing(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    methods = tuple(POLICIES.items())
    tasks = [Task(request, methods) for request in requests]
    single = set(generate(model, tasks, LIMITS, longest_run=1))
    assert len(single) == 80
    for longest_run, max_batch in ((64, 16), (3, 7)):
        assert single == set(
            generate(model, tasks, LIMITS, longest_run=longest_run, max_batch=max_batch)
        )


def test_the_first_difference_is_where_the_answers_part(
    model: LoadedModel,
    requests: list[SomeRequest],
    answers: dict[str, Generation],
    store: KVStore,
) -> None:
    replayer = Replayer(model, store, LIMITS)
    parted = 0
    for request in requests:
        known = answers[request.id].token_ids
        trace = replayer.trace(Task(request, (("full", FullKV()),)), known)
        for one in replayer.replay(trace, POLICIES.items()):
            found, at = one.generation.token_ids, one.first_difference
            if at is not None:
                parted += 1
                assert found[:at] == known[:at]
                assert found[at : at + 1] != known[at : at + 1]
        replayer.free(trace)
    assert parted > 10


def test_what_cannot_change_is_not_computed(
    model: LoadedModel,
    requests: list[SomeRequest],
    answers: dict[str, Generation],
    store: KVStore,
) -> None:
    replayer = Replayer(model, store, LIMITS)
    request = next(r for r in requests if answers[r.id].new_tokens == 30)
    trace = replayer.trace(Task(request, (("full", FullKV()),)), answers[request.id].token_ids)
    assert trace.fed == 29  # the last token was cut off, not fed
    released = (Level.RELEASE,)
    methods: list[tuple[str, Method]] = [
        ("nothing", FullKV()),
        ("never leaving", ByToken(1.0, 1, released, (3,), recent=29)),
        ("top", ByToken(1.0, 1, released, (3,), recent=20)),
        ("upper", ByToken(1.0, 1, released, (2, 3), recent=9)),
        ("all", ByToken(1.0, 1, released, EVERY)),
    ]
    found = {one.generation.entry: one for one in replayer.replay(trace, methods)}
    # Token 0 already lies elsewhere, so every row may sum in another order.
    first_pass = {"nothing": 0, "never leaving": 29, "top": 29, "upper": 2 * 29, "all": 4 * 29}
    for name, expected in first_pass.items():
        one = found[name]
        if one.first_difference is None:
            assert one.token_layers == expected
        else:
            again = (one.generation.new_tokens - one.first_difference) * LAYERS
            assert expected < one.token_layers <= expected + again
    replayer.free(trace)


def test_an_answer_that_the_model_would_not_give(
    model: LoadedModel,
    requests: list[SomeRequest],
    answers: dict[str, Generation],
    store: KVStore,
) -> None:
    """Another engine's answer: replay still gives what decoding gives."""
    request = next(r for r in requests if answers[r.id].text in ("yes", "no"))
    replayer = Replayer(model, store, LIMITS)
    methods = tuple(POLICIES.items())
    decoded = {g.entry: g for g in generate(model, [Task(request, methods)], LIMITS)}
    for text in ("yes", "no"):
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        trace = replayer.trace(Task(request, methods), ids)
        for one in replayer.replay(trace, methods):
            assert one.generation == decoded[one.generation.entry]
        replayer.free(trace)


@pytest.mark.parametrize("start", ['"~"', '"~~~~"', "[a-z]"])
@pytest.mark.parametrize("rest", ["[a-z ]{3,9}", "[a-z]", '"!"', '""'])
@pytest.mark.parametrize("limit", [1, 2, 6])
def test_the_ends_of_answers(
    model: LoadedModel, store: KVStore, start: str, rest: str, limit: int
) -> None:
    """Forced beginnings, ends and whole answers, an empty rest, answers cut off at once."""
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    grammar = compiler.compile_grammar(f"root ::= {start} {rest}")
    limits, methods = Limits(limit), tuple(POLICIES.items())
    replayer = Replayer(model, store, limits)
    for prompt in ((7,), tuple(range(20, 57))):
        task = Task(SomeRequest("ends", prompt, grammar), methods)
        single = {found.entry: found for found in generate(model, [task], limits, longest_run=1)}
        assert set(single.values()) == set(generate(model, [task], limits))
        trace = replayer.trace(task, single["full"].token_ids)
        for one in replayer.replay(trace, methods, max_batch=3):
            assert one.generation == single[one.generation.entry]
        replayer.free(trace)


def test_replay_leaves_the_bits_that_decoding_leaves(
    model: LoadedModel,
    requests: list[SomeRequest],
    answers: dict[str, Generation],
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every key and value in the store, at every level, not the tokens alone."""
    left: list[list[dict[str, tuple[torch.Tensor, ...]]]] = []
    free = KVStore.free

    def watched(self: KVStore, seat: Seat) -> None:
        left.append([self.dense(seat, layer) for layer in range(LAYERS)])
        free(self, seat)

    replayer = Replayer(model, store, LIMITS)
    request = next(r for r in requests if answers[r.id].new_tokens == 30)
    trace = replayer.trace(Task(request, (("full", FullKV()),)), answers[request.id].token_ids)
    monkeypatch.setattr(KVStore, "free", watched)
    for named in POLICIES.items():
        left.clear()
        list(generate(model, [Task(request, (named,))], LIMITS, longest_run=1))
        list(replayer.replay(trace, [named]))
        decoded, replayed = left
        for layer in range(LAYERS):
            assert decoded[layer].keys() == replayed[layer].keys()
            for kind, parts in decoded[layer].items():
                assert all(map(torch.equal, parts, replayed[layer][kind]))
    monkeypatch.undo()
    replayer.free(trace)


@pytest.mark.parametrize("max_batch", [1, 32])
def test_given_up_answers_end_early_and_others_are_the_same(
    model: LoadedModel,
    requests: list[SomeRequest],
    answers: dict[str, Generation],
    store: KVStore,
    max_batch: int,
) -> None:
    """Given up where the text has two more characters, or one, than the trace's answer shares."""
    replayer = Replayer(model, store, LIMITS)
    seen = {"given up": 0, "other": 0, "same": 0}
    for request in requests[:4]:
        known = answers[request.id]
        trace = replayer.trace(full([request])[0], known.token_ids)
        asked: list[str] = []

        def give_up(text: str, known: str = known.text, asked: list[str] = asked) -> bool:
            asked.append(text)
            shared = next((n for n, c in enumerate(text) if c != known[n : n + 1]), len(text))
            return len(text) >= shared + 2 and len(text) % 2 == 0

        whole = {f.generation.entry: f for f in replayer.replay(trace, POLICIES.items())}
        found = replayer.replay(trace, POLICIES.items(), max_batch=max_batch, give_up=give_up)
        for one in found:
            complete = whole[one.generation.entry]
            assert one.first_difference == complete.first_difference
            if not one.given_up:
                assert one == complete
                seen["same" if one.first_difference is None else "other"] += 1
                continue
            seen["given up"] += 1
            tokens = one.generation.token_ids
            assert one.first_difference is not None
            assert one.first_difference < len(tokens)
            assert tokens == complete.generation.token_ids[: len(tokens)]
            assert complete.generation.text.startswith(one.generation.text)
            assert one.generation.finish == "length"
            assert one.generation.text.rstrip("\ufffd") in asked
            assert one.token_layers <= complete.token_layers
        # Asked of no whole answer, and of each beginning once an answer.
        assert known.text not in asked
        replayer.free(trace)
    assert min(seen.values()) >= 3


def test_half_a_character_is_not_shown(
    model: LoadedModel, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every letter of this grammar is two tokens of one byte each."""
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    grammar = compiler.compile_grammar("root ::= [\u0400-\u04ff]{4,12}")
    task = Task(SomeRequest("letters", tuple(range(20, 57)), grammar), tuple(POLICIES.items()))
    known = {found.entry: found for found in generate(model, [task], LIMITS)}
    replayer = Replayer(model, store, LIMITS)
    trace = replayer.trace(task, known["full"].token_ids)
    asked: list[str] = []

    def give_up(text: str) -> bool:
        asked.append(text)
        return False

    for one in replayer.replay(trace, POLICIES.items(), give_up=give_up):
        assert one.generation == known[one.generation.entry]
    assert len(asked) > 5
    assert all("\u0400" <= letter <= "\u04ff" for text in asked for letter in text)
    replayer.free(trace)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 4, 32])
def test_every_method_has_its_outcome(
    model: LoadedModel,
    requests: list[SomeRequest],
    answers: dict[str, Generation],
    store: KVStore,
    max_batch: int,
) -> None:
    replayer = Replayer(model, store, LIMITS)
    for request in requests[:3]:
        trace = replayer.trace(full([request])[0], answers[request.id].token_ids)
        found = replayer.replay(trace, POLICIES.items(), max_batch=max_batch)
        assert sorted(one.generation.entry for one in found) == sorted(POLICIES)
        replayer.free(trace)


@pytest.mark.parametrize("max_batch", [1, 5, 32])
def test_traces_are_judged_side_by_side(
    model: LoadedModel,
    requests: list[SomeRequest],
    answers: dict[str, Generation],
    store: KVStore,
    max_batch: int,
) -> None:
    """Two at a time, every other one with early ends: each as if it were alone."""
    replayer = Replayer(model, store, LIMITS)
    gives_up = {request.id for request in requests[1::2]}

    def give_up_of(request: SomeRequest) -> GiveUp | None:
        return (lambda text: len(text) >= 8) if request.id in gives_up else None

    alone: dict[tuple[str, str], Replayed] = {}
    for request in requests:
        trace = replayer.trace(full([request])[0], answers[request.id].token_ids)
        for one in replayer.replay(trace, POLICIES.items(), give_up=give_up_of(request)):
            alone[request.id, one.generation.entry] = one
        replayer.free(trace)
    left: dict[str, int] = {}
    traces: dict[str, Trace] = {}
    waited = 0

    def asked() -> Iterator[Asked | None]:
        nonlocal waited
        for request in requests:
            while len(traces) == 2:
                waited += 1
                yield None
            trace = replayer.trace(full([request])[0], answers[request.id].token_ids)
            traces[request.id], left[request.id] = trace, len(POLICIES)
            for named in POLICIES.items():
                yield Asked(trace, named, give_up_of(request))

    together: dict[tuple[str, str], Replayed] = {}
    for one in replayer.replay_all(asked(), max_batch=max_batch):
        request_id = one.generation.request_id
        together[request_id, one.generation.entry] = one
        left[request_id] -= 1
        if not left[request_id]:
            replayer.free(traces.pop(request_id))
    assert together == alone
    assert bool(waited) == (max_batch > 1)
    assert {request_id for (request_id, _), one in alone.items() if one.given_up} <= gives_up
    assert any(one.given_up for one in alone.values())


def test_a_broken_off_replay_leaves_nothing_behind(
    model: LoadedModel, requests: list[SomeRequest], store: KVStore
) -> None:
    replayer = Replayer(model, store, LIMITS)
    task = full(requests[:1])[0]
    trace = replayer.trace(task, next(generate(model, [task], LIMITS)).token_ids)
    outcomes = replayer.replay(trace, POLICIES.items(), max_batch=4)
    next(outcomes)
    outcomes.close()
    with pytest.raises(ValueError, match="acts on attention"):
        list(replayer.replay(trace, [*POLICIES.items(), ("snapkv", SnapKV(budget=0.5))]))
    assert [seat for seat in store.seats if seat is not None] == [trace.prompt]
    replayer.free(trace)


def test_a_store_too_small_for_one_replay_is_told(
    model: LoadedModel, requests: list[SomeRequest], answers: dict[str, Generation]
) -> None:
    small = new_store(model, seats=4, capacity_tokens=128)
    replayer = Replayer(model, small, LIMITS)
    trace = replayer.trace(full(requests[:1])[0], answers[requests[0].id].token_ids)
    assert len(list(replayer.replay(trace, [("full", FullKV())]))) == 1
    with pytest.raises(PaskError, match="slots, not free"):
        list(replayer.replay(trace, [("all", ByToken(1.0, 1, MIXED, EVERY, recent=90))]))


def test_a_store_with_room_for_a_few_replays_holds_them_one_after_another(
    model: LoadedModel, requests: list[SomeRequest], answers: dict[str, Generation]
) -> None:
    """Prompts that each replay places anew take pages beside those it is promised."""
    request = max(requests, key=lambda one: len(one.prompt_ids))
    kept = (Level.HIGH, Level.HIGH, Level.HIGH, Level.RELEASE)
    methods = [(str(n), ByToken(1.0, n, (Level.HIGH,), EVERY, prompt=kept)) for n in range(3)]
    for capacity_tokens in range(496, 640, 16):
        small = new_store(model, seats=40, capacity_tokens=capacity_tokens)
        replayer = Replayer(model, small, LIMITS)
        trace = replayer.trace(full([request])[0], answers[request.id].token_ids)
        assert len(list(replayer.replay(trace, methods))) == 3
        replayer.free(trace)
        small.check()


def test_refusals(model: LoadedModel, requests: list[SomeRequest], store: KVStore) -> None:
    replayer = Replayer(model, store, LIMITS)
    task = full(requests[:1])[0]
    with pytest.raises(PaskError, match="does not allow token 0"):
        replayer.trace(task, [5, 5])
    good = next(iter(generate(model, [task], LIMITS))).token_ids
    with pytest.raises(PaskError, match="breaks off after 2 tokens"):
        replayer.trace(task, good[:2])
    with pytest.raises(PaskError, match="an answer of 31 tokens, more than 30"):
        replayer.trace(task, [*good, *range(31 - len(good))])
    trace = replayer.trace(task, good)
    with pytest.raises(ValueError, match="acts on attention"):
        list(replayer.replay(trace, [("snapkv", SnapKV(budget=0.5))]))
    replayer.free(trace)


def test_a_trace_holds_what_the_layers_saw(
    model: LoadedModel, requests: list[SomeRequest], answers: dict[str, Generation], store: KVStore
) -> None:
    """Keys and values of the answer's tokens as a prefill of prompt and answer has them."""
    replayer = Replayer(model, store, LIMITS)
    request = requests[6]
    trace = replayer.trace(full([request])[0], answers[request.id].token_ids)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    ids = [*request.prompt_ids, *trace.tokens[: trace.fed]]
    model.transformer.prefill(ids, lambda layer, q, k, v: seen.append((k, v)))
    prompt = len(request.prompt_ids)
    for layer, (keys, values) in enumerate(seen):
        expected = keys[:, prompt:].transpose(0, 1)
        torch.testing.assert_close(trace.keys[layer], expected, rtol=0.02, atol=0.02)
        expected = values[:, prompt:].transpose(0, 1)
        torch.testing.assert_close(trace.values[layer], expected, rtol=0.02, atol=0.02)
    replayer.free(trace)
