"""Every method of the registry keeps the contract, over tokens and over bytes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pask.bfcl.data import load_rows
from pask.bfcl.request import RequestBuilder
from pask.engine import decode
from pask.engine.decode import generate
from pask.engine.generation import Generation, Limits, Task
from pask.engine.kv_seat import Seat
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.errors import HarnessFault
from pask.methods.contract import UNREACHABLE, Method, Wants
from pask.methods.full import FullKV
from pask.methods.registry import registry
from tests.cpu.conformance_cases import CASES, LENGTHS, budgets, info_for, method
from tests.cpu.conformance_requests import (
    METHODS,
    Grammar,
    answers,
    entries,
    grammar_of,
    request_of,
    small_model,
)
from tests.cpu.conformance_walk import walk
from tests.cpu.toys import CALLS

AND_BUDGETS = [(name, budget) for name in METHODS for budget in budgets(name)]
BELOW_FULL = [(name, budget) for name, budget in AND_BUDGETS if budget < 1.0 or name == "full"]
WHOLE = [name for name in METHODS if registry()[name].budgets[1] == 1.0]
LIMIT = 6  # choices of a token; one less is fed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def endless(model: LoadedModel) -> Grammar:
    """No answer under it ends before the limit, and all of it is a value."""
    return grammar_of(model, "root ::= letters\nletters ::= [a-z]{400}")


@pytest.fixture(scope="module")
def calls(model: LoadedModel) -> Grammar:
    return grammar_of(model, CALLS)


def test_every_method_has_been_thought_about() -> None:
    """A new method gets a line in `CASES`: its bytes in closed form, and what it never drops."""
    assert sorted(CASES) == METHODS


def test_colours_and_markers_tell_the_methods_apart() -> None:
    for what in ("color", "marker", "label"):
        most, count = Counter(getattr(cls, what) for cls in registry().values()).most_common(1)[0]
        assert count == 1, f"{what} {most!r} is given to {count} methods"


# Keeping everything


@pytest.mark.parametrize("name", WHOLE)
def test_with_the_knob_at_its_maximum_it_is_full_kv(
    name: str, model: LoadedModel, calls: Grammar
) -> None:
    requests = [request_of(model, calls, length, 3) for length in (1, 2, 8, 33, 64, 90)]
    top = registry()[name].knob_range[1]
    entries: list[tuple[str, Method]] = [("full", FullKV()), ("budget", method(name, 1.0))]
    if registry()[name]().has_knob:
        entries.append(("nominal", method(name, None, top)))
    found = answers(model, [Task(request, tuple(entries), 9) for request in requests], 30)
    for request in requests:
        whole = found[request.id, "full"]
        for entry, one in entries[1:]:
            assert found[request.id, entry] == dataclasses.replace(whole, entry=entry)
            assert one.open(info_for(len(request.prompt_ids))).wants == Wants()


# Bytes


@dataclasses.dataclass(frozen=True)
class Ended:
    """An answer, and the bytes of the tensors that held its KV when it ended."""

    answer: Generation
    in_tensors: int


def ended(
    model: LoadedModel, tasks: Sequence[Task], limit: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ended]:
    """One answer at a time, so that whatever the store holds is that answer's."""
    stores: list[KVStore] = []

    def watched(*args: Any, **kwargs: Any) -> KVStore:
        stores.append(new_store(*args, **kwargs))
        return stores[-1]

    new_store = decode.new_store
    monkeypatch.setattr(decode, "new_store", watched)
    for answer in generate(model, tasks, Limits(limit), max_batch=1):
        (store,) = stores
        (seat,) = filter(None, store.seats)
        yield Ended(answer, tensor_bytes(store, seat))


def tensor_bytes(store: KVStore, seat: Seat) -> int:
    """Of all pages in use, and the seat's key statistics."""
    total = 0
    for pool in store.seat_pages.pools.values():
        pages = np.flatnonzero(pool.references)
        total += sum(part[torch.from_numpy(pages)].nbytes for part in pool.tensors)
    if seat.has_statistics:
        for vectors in (store.statistics.center, store.statistics.spread):
            total += vectors[:, seat.id].nbytes
    return total


@pytest.mark.parametrize(("name", "budget"), BELOW_FULL)
def test_bytes_are_the_tensors_and_the_formula(
    name: str,
    budget: float,
    model: LoadedModel,
    endless: Grammar,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, fed = method(name, budget), CASES[name].fed
    requests = [request_of(model, endless, length) for length in CASES[name].lengths]
    tasks = [Task(request, ((name, one),), fed) for request in requests]
    for found in ended(model, tasks, fed + 1, monkeypatch):
        counted = found.answer.bytes
        prompt = found.answer.prompt_tokens
        about = info_for(prompt, expected_new_tokens=fed)
        assert found.answer.new_tokens == fed + 1
        assert counted.prompt + counted.decode == found.in_tensors, prompt
        assert found.in_tensors == CASES[name].resident(one, about, fed), prompt


@pytest.mark.parametrize("name", [name for name in METHODS if registry()[name]().has_knob])
def test_more_of_the_knob_is_never_fewer_bytes(
    name: str, model: LoadedModel, endless: Grammar
) -> None:
    low, high = registry()[name].knob_range
    settings = [low + (high - low) * n / 12 for n in range(13)]
    entries = tuple((f"{n}", method(name, None, value)) for n, value in enumerate(settings))
    requests = [request_of(model, endless, length) for length in (3, 40, 131, 310)]
    found = answers(model, [Task(request, entries, LIMIT - 1) for request in requests], LIMIT)
    for request in requests:
        counts = [found[request.id, f"{n}"].bytes for n in range(len(settings))]
        held = [count.prompt + count.decode for count in counts]
        assert held == sorted(held)
    most = found[requests[-1].id, "12"].bytes
    least = found[requests[-1].id, "0"].bytes
    assert least.prompt + least.decode < most.prompt + most.decode


@pytest.mark.parametrize(("name", "budget"), BELOW_FULL)
def test_what_lies_above_the_budget_is_said(
    name: str, budget: float, model: LoadedModel, endless: Grammar
) -> None:
    """A request above its budget has a note, where there is a knob. A page a head, for each kind of
    region that is held, may be the price of rounding."""
    one = method(name, budget)
    if not one.has_knob:
        return
    limit, expected = 40, 39
    requests = [request_of(model, endless, length) for length in (1, 9, 33, 64, 130)]
    found = answers(model, [Task(request, ((name, one),), expected) for request in requests], limit)
    for answer in found.values():
        counted = answer.bytes
        state = one.open(info_for(answer.prompt_tokens, expected_new_tokens=expected))
        kinds = 1 + len(state.levels) + (state.choice is not None)
        page = 16 * counted.full_prompt // answer.prompt_tokens
        if counted.prompt + counted.decode > budget * counted.full + kinds * page:
            assert UNREACHABLE in answer.notes, answer.prompt_tokens


# What is kept


@pytest.mark.parametrize(("name", "budget"), AND_BUDGETS)
def test_what_is_kept_is_valid_and_the_latest_stay(name: str, budget: float) -> None:
    one = method(name, budget)
    for length in LENGTHS[:-1]:
        info = info_for(length)
        states = list(walk(one.open(info), info, seed=length))
        window = CASES[name].window(one, info)
        assert 0 <= window <= length
        latest = range(length - window, length)
        for heads in states[info.layers - 1]:
            for kept in heads:
                assert kept, length
                assert set(latest) <= {token for token, _ in kept}, length


@pytest.mark.parametrize(("name", "budget"), AND_BUDGETS)
def test_two_requests_of_one_method_know_nothing_of_each_other(name: str, budget: float) -> None:
    one = method(name, budget)
    before = repr(one)
    for short, long in ((5, 64), (40, 41), (90, 90)):
        infos = (info_for(short), info_for(long))
        alone = [list(walk(one.open(info), info, seed)) for seed, info in enumerate(infos)]
        states = [one.open(info) for info in infos]
        walks = [
            walk(state, info, seed)
            for seed, (state, info) in enumerate(zip(states, infos, strict=True))
        ]
        in_turns = list(zip(*walks, strict=True))
        assert [list(steps) for steps in zip(*in_turns, strict=True)] == alone
    assert repr(one) == before


# Small requests


@pytest.mark.parametrize("name", METHODS)
def test_one_prompt_token_one_answer_token_and_no_answer_expected(
    name: str, model: LoadedModel, calls: Grammar
) -> None:
    tasks = [
        Task(request_of(model, calls, length), ((name, method(name, budget)),), 0)
        for length in (1, 2)
        for budget in budgets(name)
    ]
    for task in tasks:
        (found,) = answers(model, [task], 1).values()
        assert (found.new_tokens, found.finish) == (1, "length")
        # The first token comes from the exact prefill.
        (whole,) = answers(model, [Task(task.request, (("full", FullKV()),))], 1).values()
        assert found.token_ids == whole.token_ids


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_without_labels_is_answered_or_refused_in_one_line(
    name: str, model: LoadedModel, calls: Grammar
) -> None:
    request = dataclasses.replace(request_of(model, calls, 30), prompt_labels=None)
    task = Task(request, ((name, dict(entries())[name]),))
    told = None
    try:
        answers(model, [task], 6)
    except HarnessFault as error:
        told = str(error)
    assert told is None or ("ValueError" in told and "label" in told and "\n" not in told)


def test_a_tool_without_a_description(model: LoadedModel) -> None:
    row = load_rows()["simple_python_0"]
    bare = {**row.functions[0], "description": ""}
    bare["parameters"] = {
        **bare["parameters"],
        "properties": {
            key: {**value, "description": ""}
            for key, value in bare["parameters"]["properties"].items()
        },
    }
    builder = RequestBuilder(model.tokenizer, tokenizer_info(model), "one_example", "json_list")
    request = builder.build(dataclasses.replace(row, functions=(bare,)))
    found = answers(model, [Task(request, tuple(entries()), 20)], 6)
    assert sorted(entry for _, entry in found) == METHODS
    assert len({answer.token_ids[0] for answer in found.values()}) == 1
