"""A method's answer is its own: alone, in company, in any order and on a fork of its seat."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pask.engine import decode
from pask.engine.generation import Generation, Task
from pask.engine.kv_seat import Seat
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel
from tests.cpu.conformance_requests import (
    METHODS,
    Grammar,
    answers,
    entries,
    grammar_of,
    request_of,
    small_model,
)
from tests.cpu.stores import fed
from tests.cpu.toys import CALLS, SomeRequest

Answers = dict[tuple[str, str], Generation]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def calls(model: LoadedModel) -> Grammar:
    return grammar_of(model, CALLS)


@pytest.fixture(scope="module")
def requests(model: LoadedModel, calls: Grammar) -> list[SomeRequest]:
    return [request_of(model, calls, length, start=length) for length in (1, 21, 47, 70, 115)]


@pytest.fixture(scope="module")
def in_company(model: LoadedModel, requests: list[SomeRequest]) -> list[Answers]:
    """All requests under all methods together, and the other way round in small batches."""
    forward = [Task(request, tuple(entries()), 20) for request in requests]
    backward = [Task(request, tuple(entries()[::-1]), 20) for request in requests[::-1]]
    return [answers(model, forward, 24), answers(model, backward, 24, max_batch=5)]


@pytest.mark.parametrize("name", METHODS)
def test_an_answer_is_the_same_alone_in_company_and_in_any_order(
    name: str, model: LoadedModel, requests: list[SomeRequest], in_company: list[Answers]
) -> None:
    one = dict(entries())[name]
    alone: Answers = {}
    for request in requests:
        alone |= answers(model, [Task(request, ((name, one),), 20)], 24, max_batch=1)
    for company in in_company:
        assert {key: found for key, found in company.items() if key[1] == name} == alone


@pytest.mark.parametrize("name", METHODS)
def test_an_answer_on_a_fork_is_the_same_and_leaves_the_seat_alone(
    name: str,
    model: LoadedModel,
    requests: list[SomeRequest],
    in_company: list[Answers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the prefill every answer goes on in a fork of its seat; the seat goes on otherwise."""
    first: list[tuple[KVStore, Seat, list[Any]]] = []

    def forked(model: LoadedModel, prepared: Any, seats: list[Seat], store: KVStore) -> Any:
        logits = prefill(model, prepared, seats, store)
        for number, seat in enumerate(seats):
            seats[number] = store.fork(seat)
            fed(model, store, [seat], [[5, 6, 7]])
            first.append((store, seat, contents(store, seat)))
        return logits

    prefill = decode.prefill
    monkeypatch.setattr(decode, "prefill", forked)
    one = dict(entries())[name]
    found = answers(model, [Task(request, ((name, one),), 20) for request in requests], 24)
    assert found == {key: value for key, value in in_company[0].items() if key[1] == name}
    assert len(first) == len(requests)
    for store, seat, before in first:
        for (kind, *tensors), (kind_now, *tensors_now) in zip(
            before, contents(store, seat), strict=True
        ):
            assert kind == kind_now
            assert all(map(torch.equal, tensors, tensors_now))


def contents(store: KVStore, seat: Seat) -> list[Any]:
    """A copy of all that a seat holds, by layer and kind of region."""
    return [
        (kind, *(part.clone() for part in parts))
        for layer in range(store.shape.layers)
        for kind, parts in sorted(store.dense(seat, layer).items())
    ]
