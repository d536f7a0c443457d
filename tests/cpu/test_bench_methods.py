"""`pask bench methods` on a tiny model: what is counted as whose work, never how long it took."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from pask.bench import methods, own_work
from pask.bench.own_work import Watch
from pask.cli import main
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.loading import LoadedModel, load_model
from pask.methods.contract import (
    Captures,
    Decoded,
    Method,
    Placement,
    PromptInfo,
    RequestState,
    Wants,
)
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.methods.registry import registry
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import EveryThird, SomeRequest, toy_requests

NAP = 0.02


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_folder(
        tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=16384, head_dim=32
    )
    return load_model(str(folder))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    return toy_requests(model)[:3]  # 12, 17 and 22 prompt tokens


def watched(
    model: LoadedModel, requests: list[SomeRequest], entries: dict[str, Method]
) -> tuple[Watch, dict[tuple[str, str], tuple[int, ...]]]:
    watch = Watch()
    tasks = [Task(request, tuple(entries.items()), 6) for request in requests]
    with watch.on():
        answers = {
            (one.request_id, one.entry): one.token_ids
            for one in generate(model, tasks, Limits(6), max_batch=32)
        }
    return watch, answers


@dataclass(frozen=True)
class Slow(EveryThird):
    """Sleeps where it is asked: so long a layer, so long a step."""

    placing: float = 0.0
    evicting: float = 0.0

    def open(self, info: PromptInfo) -> RequestState:
        return _SlowState(self, info)


class _SlowState(RequestState):
    evicts = True
    wants = Wants(prompt_mass=True, step_mass=True)

    def __init__(self, method: Slow, info: PromptInfo) -> None:
        self.method = method

    def place(self, layer: int, captures: Captures) -> Placement:
        time.sleep(self.method.placing)
        return Placement()

    def evict(self, tokens: int, mass: torch.Tensor | None) -> None:
        time.sleep(self.method.evicting)


def test_what_a_method_spends_is_its_own_and_in_the_right_phase(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    watched(model, requests, {"first": Slow()})  # what is loaded at its first use is nobody's work
    entries = {"full": FullKV(), "placing": Slow(placing=NAP), "evicting": Slow(evicting=NAP)}
    watch, _ = watched(model, requests, entries)
    naps = 3 * model.layout.layers * NAP
    assert watch.own["placing", "prefill"] > naps
    assert watch.own["evicting", "prefill"] < naps
    # One token a step, 5 of 6 are fed, for each of 3 requests.
    assert watch.calls["evicting", "evicted"] == watch.rows["evicting"] == 15
    assert watch.own["evicting", "decode"] > 15 * NAP
    assert watch.own["placing", "decode"] < 15 * NAP
    assert watch.share("evicting", "decode") > 0.5 > watch.share("full", "decode")
    for entry in entries:
        for phase in ("prefill", "decode"):
            assert 0 <= watch.share(entry, phase) < 1
            assert watch.own[entry, phase] < watch.total[entry, phase]
    for entry in ("full", "evicting"):  # `placing` decodes within a difference of two timings
        assert watch.own[entry, "decode"] >= 0
    assert min(watch.own[entry, "prefill"] for entry in entries) >= 0
    # The others' naps are no part of what Full KV's prefill takes.
    assert watch.total["full", "prefill"] < watch.total["placing", "prefill"] - 0.9 * naps


def test_full_kv_does_nothing_of_its_own(model: LoadedModel, requests: list[SomeRequest]) -> None:
    watch, _ = watched(model, requests, {"full": FullKV(), "slow": Slow()})
    of_full = {name: count for (entry, name), count in watch.calls.items() if entry == "full"}
    assert of_full == {"placement": 3 * model.layout.layers}
    assert watch.own["full", "decode"] == 0
    of_slow = {name for entry, name in watch.calls if entry == "slow"}
    assert of_slow == {"placement", "evicted", "mass", "paged_attention"}


class _Low(RequestState):
    """All at INT4, decoded tokens too."""

    levels = frozenset({Level.LOW4})
    acts_on_tokens = True

    def __init__(self, info: PromptInfo) -> None:
        self.info = info

    def place(self, layer: int, captures: Captures) -> Placement:
        tokens = torch.arange(self.info.prompt_tokens).expand(self.info.kv_heads, -1)
        return Placement({Level.LOW4: tokens})

    def level_of(self, decoded: Decoded) -> list[Level]:
        return [Level.LOW4] * self.info.layers


@dataclass(frozen=True)
class Low(EveryThird):
    def open(self, info: PromptInfo) -> RequestState:
        return _Low(info)


@dataclass(frozen=True)
class SlowLow(Low):
    """Sleeps at every token that it decides."""

    def open(self, info: PromptInfo) -> RequestState:
        return _SlowLow(info)


class _SlowLow(_Low):
    def level_of(self, decoded: Decoded) -> list[Level]:
        time.sleep(NAP)
        return super().level_of(decoded)


def test_the_lookup_is_the_part_that_decides(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    entries = {"low": Low(), "slow_low": SlowLow(), "slow": Slow(evicting=NAP)}
    watch, _ = watched(model, requests, entries)
    assert watch.spent["slow_low", "levels_of"] > watch.calls["slow_low", "levels_of"] * NAP
    assert watch.spent["slow_low", "levels_of"] < watch.own["slow_low", "decode"]
    assert watch.lookup("slow_low") > 0.5 > watch.lookup("low") > 0
    assert watch.lookup("slow") == 0  # evicting is own work, but no lookup
    assert watch.lookup("no such entry") == 0


def test_quantising_is_own_work(model: LoadedModel, requests: list[SomeRequest]) -> None:
    watch, _ = watched(model, requests, {"full": FullKV(), "low": Low()})
    of_low = {name: count for (entry, name), count in watch.calls.items() if entry == "low"}
    layers = model.layout.layers
    assert of_low["measure"] == of_low["placement"] == 3 * layers
    assert of_low["append_low"] > 3 * layers  # the prompt's, and the decoded tokens'
    assert of_low["levels_of"] > 0


def test_watching_changes_no_answer_and_leaves_nothing_behind(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    entries = {"full": FullKV(), "third": EveryThird(window=3), "low": Low(), "slow": Slow()}
    wrapped = (*own_work._IN_PREFILL, *own_work._IN_DECODE)
    before = [getattr(owner, name) for owner, name in wrapped]
    _, answers = watched(model, requests, entries)
    assert [getattr(owner, name) for owner, name in wrapped] == before
    tasks = [Task(request, tuple(entries.items()), 6) for request in requests]
    assert answers == {
        (one.request_id, one.entry): one.token_ids for one in generate(model, tasks, Limits(6))
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, model: LoadedModel) -> Path:
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model.folder),
            "prompt": "one_example",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 12, "live": 12},
        },
        "data": {"sample": {"simple_python": 1, "parallel": 1}},
        "decode": {"max_new_tokens": 8},
        "methods": [{"name": "full"}],
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def test_every_method_of_the_registry_has_its_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "methods", "--config", str(config), "--items", "2"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["name"], result["n"], result["theirs"]) == ("methods", 2, 10)
    found = re.findall(
        r"^  (\w+) +([\d.]+) +[\d.]+ +([\d.]+) +[\d.]+ +([\d.]+) +([\d.]+)(?: over)?$",
        captured.err,
        flags=re.MULTILINE,
    )
    assert [name for name, *_ in found] == sorted(registry())
    shares = [float(share) for _, _, *pair, _ in found for share in pair]
    assert result["ours"] == pytest.approx(max(shares), abs=0.02)
    assert result["ratio"] == pytest.approx(10 / result["ours"], rel=0.02)
    for name, budget, *_ in found:
        low, high = registry()[name].budgets
        assert float(budget) == pytest.approx(min(max(0.33, low), high), abs=6e-4)
    looked_up = {name for name, *_, lookup in found if float(lookup) > 0}
    assert {"pask_decode", "uniform_int4"} <= looked_up  # `pask` leaves answers this short alone
    assert not looked_up & {"full", "h2o", "snapkv", "transattn"}
    calls = re.search(r"others ran: the same calls in the engine \((\d+) and (\d+)\)", captured.err)
    assert calls is not None
    assert int(calls[1]) == int(calls[2]) > 100


def test_more_calls_under_full_kv_are_told(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another method had left something behind."""
    counts = iter((3, 5))
    monkeypatch.setattr(
        methods._Work,
        "calls_of_full",
        lambda self: methods.Counter({"engine/kv_step:Step.attend": next(counts)}),
    )
    assert main(["bench", "methods", "--config", str(config), "--items", "1"]) == 0
    told = capsys.readouterr().err
    assert "NOT the same calls in the engine (3 and 5)" in told
    assert "  2 more of engine/kv_step:Step.attend" in told
