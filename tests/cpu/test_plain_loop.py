"""The plain transformers loop and the engine: two ways to the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baselines.snapkv import SnapKV
from pask.bench.plain import PlainLoop
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.loading import load_model
from pask.methods.contract import Method
from pask.methods.full import FullKV
from tests.cpu.policies import ByToken
from tests.cpu.tiny import LAYOUTS, tiny_folder
from tests.cpu.toys import EveryThird, toy_requests

METHODS: tuple[tuple[str, Method], ...] = (
    ("full", FullKV()),
    ("snapkv@0.5", SnapKV(budget=0.5, window=4)),
    ("snapkv@0.3", SnapKV(budget=0.3, window=4)),
    ("third", EveryThird()),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_kv_and_eviction_give_the_same_answers(layout: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, layout, seed=3)
    model, plain = load_model(str(folder)), PlainLoop(folder)
    requests = toy_requests(model)[4:]
    found = {
        (one.request_id, one.entry): one.token_ids
        for one in generate(
            model,
            [Task(request, METHODS, 10) for request in requests],
            Limits(16),
            kv_dtype=torch.float32,
        )
    }
    differ = 0
    for request in requests:
        for name, method in METHODS:
            answer = plain.answer(request, method, 10, 16)
            assert found[request.id, name] == answer
            differ += answer != found[request.id, "full"]
    assert differ >= 5  # eviction does change answers


def test_the_plain_loop_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama", seed=3)
    request = toy_requests(load_model(str(folder)))[0]
    with pytest.raises(ValueError, match="cannot run by_token"):
        PlainLoop(folder).answer(request, ByToken(), 10, 4)
