"""A model, requests to it and their answers, as the conformance tests use them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xgrammar as xgr

from pask.engine.decode import generate
from pask.engine.generation import Generation, Limits, Task
from pask.engine.loading import LoadedModel, load_model
from pask.methods.contract import Method
from pask.methods.registry import registry
from tests.cpu.conformance_cases import budgets, labels_for, method
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import SomeRequest

METHODS = sorted(registry())
TEXT = (
    'Answer with calls. {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} '
    '{"name": "math.area", "parameters": {"base": {"type": "integer", "description": "cm"}}} '
)


def small_model(tmp: Path) -> LoadedModel:
    folder = tiny_folder(
        tmp,
        "qwen3",
        seed=4,
        head_dim=32,
        max_position_embeddings=16384,
    )
    return load_model(str(folder))


def request_of(
    model: LoadedModel, grammar: xgr.CompiledGrammar, length: int, start: int = 0
) -> SomeRequest:
    ids = model.tokenizer(TEXT * (1 + (start + length) // 40))["input_ids"]
    prompt = tuple(ids[start : start + length])
    assert len(prompt) == length
    return SomeRequest(f"of-{length}-{start}", prompt, grammar, prompt_labels=labels_for(length))


def answers(
    model: LoadedModel, tasks: Sequence[Task], limit: int, max_batch: int = 64
) -> dict[tuple[str, str], Generation]:
    found = list(generate(model, tasks, Limits(limit), max_batch=max_batch))
    assert len(found) == sum(len(task.methods) for task in tasks)
    return {(one.request_id, one.entry): one for one in found}


def entries() -> list[tuple[str, Method]]:
    return [(name, method(name, budgets(name)[len(budgets(name)) // 2])) for name in METHODS]
