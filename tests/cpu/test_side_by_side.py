"""Rows judged side by side: each as if it were alone, few at a time, as far as there is room."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import pytest

from pask.bfcl.data import load_rows
from pask.bfcl.request import RequestBuilder
from pask.calibration import side_by_side
from pask.calibration.intervention import Buckets, Interventions
from pask.calibration.reference import ReferenceRow, read_reference
from pask.calibration.sensitivity import Plan
from pask.calibration.side_by_side import SEATS, Begun, judged
from pask.engine.decode import generate, new_store
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.engine.replay import Replayed, Replayer
from pask.engine.replay_job import GiveUp, Named
from pask.methods.full import FullKV
from pask.policy.actions import Ladder
from tests.cpu.tiny import tiny_folder

LIMITS = Limits(24)
BUCKETS = Buckets(2, "role")
TRIED = Interventions(2, Ladder.parse("R,L4,H"))
IDS = ("simple_python_0", "simple_python_5", "parallel_2", "simple_python_9", "multiple_4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    shape = {"head_dim": 32, "max_position_embeddings": 16384}
    return load_model(str(tiny_folder(tmp_path_factory.mktemp("model"), "llama", seed=4, **shape)))


class Impatient(ReferenceRow):
    """Gives up what is written on, but for its beginning."""

    @cached_property
    def hopeless(self) -> GiveUp:
        return lambda text: len(text) >= 30


@pytest.fixture(scope="module")
def rows(model: LoadedModel) -> list[ReferenceRow]:
    known = load_rows()
    builder = RequestBuilder(model.tokenizer, tokenizer_info(model), "format_last", "json_list")
    tasks = [Task(builder.build(known[row_id]), (("full", FullKV()),)) for row_id in IDS]
    tokens = {found.request_id: found.token_ids for found in generate(model, tasks, LIMITS)}
    kinds = (ReferenceRow, Impatient, ReferenceRow, Impatient, ReferenceRow)
    return [
        kind(known[row_id], task, tokens[row_id], "json_list")
        for kind, row_id, task in zip(kinds, IDS, tasks, strict=True)
    ]


class Judging:
    """Begins rows, and notes how many are under way at most."""

    def __init__(self, model: LoadedModel, store: KVStore, without: Sequence[str] = ()) -> None:
        self.replayer = Replayer(model, store, LIMITS)
        self._plan = Plan(model.layout.layers, BUCKETS, TRIED)
        self._without = without
        self._under_way = self.most = 0

    def methods(self, begun: Begun) -> list[Named]:
        return self._plan.methods(begun.reference, begun.trace.fed)

    def begin(self, row: ReferenceRow) -> Begun:
        reference = read_reference(
            self.replayer, row.task, row.tokens, row.judge, buckets=BUCKETS, sinks=TRIED.sinks
        )
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        begun = Begun(row, reference, reference.trace, [])
        if row.row.id not in self._without:
            begun = replace(begun, methods=self.methods(begun))
        return begun

    def together(self, rows: Sequence[ReferenceRow], max_batch: int) -> Iterator[Begun]:
        for begun in judged(self.replayer, rows, self.begin, max_batch=max_batch):
            self._under_way -= 1
            yield begun

    def alone(self, row: ReferenceRow) -> dict[str, Replayed]:
        begun = self.begin(row)
        found = self.replayer.replay(begun.trace, self.methods(begun), give_up=row.hopeless)
        outcomes = {one.generation.entry: one for one in found}
        self.replayer.free(begun.trace)
        return outcomes


@pytest.fixture(scope="module")
def alone(model: LoadedModel, rows: list[ReferenceRow]) -> dict[str, dict[str, Replayed]]:
    store = new_store(model, seats=40, capacity_tokens=65_536)
    judging = Judging(model, store)
    return {row.row.id: judging.alone(row) for row in rows}


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("max_batch", [3, 32])
def test_each_row_has_what_it_has_alone(
    model: LoadedModel,
    rows: list[ReferenceRow],
    alone: dict[str, dict[str, Replayed]],
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
    max_batch: int,
) -> None:
    monkeypatch.setattr(side_by_side, "AT_ONCE", at_once)
    store = new_store(model, seats=max_batch + at_once + 1, capacity_tokens=65_536)
    found = {
        begun.row.row.id: begun.replayed
        for begun in Judging(model, store).together(rows, max_batch)
    }
    assert found == alone
    assert any(one.given_up for replayed in alone.values() for one in replayed.values())
    assert not any(store.seats)
    store.check()


def test_few_rows_are_under_way_at_a_time(
    model: LoadedModel, rows: list[ReferenceRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = []
    for at_once in (1, 3):
        monkeypatch.setattr(side_by_side, "AT_ONCE", at_once)
        store = new_store(model, seats=8 + SEATS, capacity_tokens=65_536)
        judging = Judging(model, store)
        assert len(list(judging.together(rows, 8))) == len(rows)
        most.append(judging.most)
    assert most[0] == 1
    assert 1 < most[1] <= 3


def test_without_room_for_two_rows_they_follow_each_other(
    model: LoadedModel, rows: list[ReferenceRow], alone: dict[str, dict[str, Replayed]]
) -> None:
    two = sorted(rows, key=lambda row: len(row.task.request.prompt_ids))[-2:]
    longest = len(two[-1].task.request.prompt_ids)
    for capacity_tokens, most in ((3 * longest + 256, 1), (8 * longest, 2)):
        store = new_store(model, seats=32 + SEATS, capacity_tokens=capacity_tokens)
        judging = Judging(model, store)
        found = {begun.row.row.id: begun.replayed for begun in judging.together(two, 32)}
        assert found == {row.row.id: alone[row.row.id] for row in two}
        assert judging.most == most


def test_rows_without_a_question_are_passed_on(
    model: LoadedModel, rows: list[ReferenceRow], alone: dict[str, dict[str, Replayed]]
) -> None:
    for without in ((IDS[0],), (IDS[1], IDS[4]), IDS):
        store = new_store(model, seats=32 + SEATS, capacity_tokens=65_536)
        judging = Judging(model, store, without)
        found = {begun.row.row.id: begun.replayed for begun in judging.together(rows, 32)}
        assert found == {row_id: {} if row_id in without else alone[row_id] for row_id in IDS}
        assert not any(store.seats)


def test_what_breaks_off_leaves_no_replay_behind(
    model: LoadedModel, rows: list[ReferenceRow]
) -> None:
    store = new_store(model, seats=32 + SEATS, capacity_tokens=65_536)
    judging = Judging(model, store)

    def begin(row: ReferenceRow) -> Begun:
        if row.row.id == IDS[3]:
            raise KeyboardInterrupt
        return judging.begin(row)

    with pytest.raises(KeyboardInterrupt):
        list(judged(judging.replayer, rows, begin, max_batch=4))
    left = [seat for seat in store.seats if seat is not None]
    assert len(left) <= 3  # prompts of rows under way
    store.check()
