"""A model, requests to it and their answers, as the conformance tests use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xgrammar as xgr

from pask.engine.decode import generate
from pask.engine.generation import Generation, Limits, Task
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.methods.contract import Method
from pask.methods.registry import registry
from pask.structure.automaton import TagGrammar
from pask.structure.ebnf import EbnfGrammar
from pask.structure.tags import Role, TokenClass
from tests.cpu.conformance_cases import budgets, labels_for, method
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import SomeRequest

METHODS = sorted(registry())
TEXT = (
    'Answer with calls. {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} '
    '{"name": "math.area", "parameters": {"base": {"type": "integer", "description": "cm"}}} '
)


ROLES = {
    "name": (TokenClass.FUNCTION_NAME, Role.FUNCTION_SELECTOR),
    "value": (TokenClass.STRING, Role.REQUIRED_VALUE),
    "letters": (TokenClass.STRING, Role.REQUIRED_VALUE),
}


@dataclass(frozen=True)
class Grammar:
    """What is allowed, and what its tokens are for: one text of xgrammar's notation."""

    masks: xgr.CompiledGrammar
    tags: TagGrammar


def grammar_of(model: LoadedModel, text: str) -> Grammar:
    """Rules that are named in `ROLES` have those roles, others are layout."""
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    roles = {name: role for name, role in ROLES.items() if f"{name} ::=" in text}
    return Grammar(compiler.compile_grammar(text), EbnfGrammar(text, roles))


def small_model(tmp: Path) -> LoadedModel:
    folder = tiny_folder(
        tmp,
        "qwen3",
        seed=4,
        head_dim=32,
        max_position_embeddings=16384,
    )
    return load_model(str(folder))


def request_of(model: LoadedModel, grammar: Grammar, length: int, start: int = 0) -> SomeRequest:
    ids = model.tokenizer(TEXT * (1 + (start + length) // 40))["input_ids"]
    prompt = tuple(ids[start : start + length])
    assert len(prompt) == length
    labels = labels_for(length)
    return SomeRequest(f"of-{length}-{start}", prompt, grammar.masks, grammar.tags, labels)


def answers(
    model: LoadedModel, tasks: Sequence[Task], limit: int, max_batch: int = 64
) -> dict[tuple[str, str], Generation]:
    found = list(generate(model, tasks, Limits(limit), max_batch=max_batch))
    assert len(found) == sum(len(task.methods) for task in tasks)
    return {(one.request_id, one.entry): one for one in found}


def entries() -> list[tuple[str, Method]]:
    return [(name, method(name, budgets(name)[len(budgets(name)) // 2])) for name in METHODS]
