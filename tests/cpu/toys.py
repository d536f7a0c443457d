"""A toy eviction method, requests and grammars for the engine's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import xgrammar as xgr

from pask.engine.generation import Task
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.methods.contract import Captures, Method, Placement, PromptInfo, RequestState, Wants
from pask.methods.full import FullKV
from pask.structure.automaton import TagGrammar
from pask.structure.labels import Label

CALLS = r"""
root ::= "[" call (", " call)* "]"
call ::= "{\"" name "\": " value "}"
name ::= "get_weather" | "math.area" | "Zürich" | [a-z]{1,6}
value ::= "null" | [0-9]{1,4} | "\"" [a-zA-Z ]{0,12} "\""
"""


@dataclass(frozen=True)
class SomeRequest:
    id: str
    prompt_ids: tuple[int, ...]
    grammar: xgr.CompiledGrammar
    tag_grammar: TagGrammar | None = None
    prompt_labels: tuple[Label, ...] | None = None


@dataclass(frozen=True)
class EveryThird(Method):
    """Keeps the last four prompt tokens and every third before, shifted by one in each kv head."""

    name: ClassVar[str] = "every_third"
    label: ClassVar[str] = "Every third"
    paper: ClassVar[str] = "a toy"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "none"
    budgets: ClassVar[tuple[float, float]] = (0.0, 1.0)

    window: int = 0

    def open(self, info: PromptInfo) -> RequestState:
        return EveryThirdState(info, self.window)


class EveryThirdState(RequestState):
    notes = ("toy",)

    def __init__(self, info: PromptInfo, window: int) -> None:
        self.info = info
        self.wants = Wants(window_queries=window)
        self.seen: list[Captures] = []

    def place(self, layer: int, captures: Captures) -> Placement:
        assert layer == len(self.seen)
        self.seen.append(captures)
        return Placement.high(kept_tokens(self.info.prompt_tokens, self.info.kv_heads))


def kept_tokens(prompt: int, kv_heads: int) -> torch.Tensor:
    count = (prompt - 4 - kv_heads) // 3
    rows = [
        [*range(head, head + 3 * count, 3), *range(prompt - 4, prompt)] for head in range(kv_heads)
    ]
    return torch.tensor(rows)


def full(requests: Sequence[SomeRequest]) -> list[Task]:
    return [Task(request, (("full", FullKV()),)) for request in requests]


def toy_requests(model: LoadedModel) -> list[SomeRequest]:
    """16 requests of 12 to 87 random tokens: calls of a toy form, every fifth a yes or no."""
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    grammar = compiler.compile_grammar(CALLS)
    short = compiler.compile_grammar('root ::= "yes" | "no"')
    draw = random.Random(5)
    return [
        SomeRequest(
            f"r{n}",
            tuple(draw.randrange(3, 440) for _ in range(12 + 5 * n)),
            short if n % 5 == 4 else grammar,
        )
        for n in range(16)
    ]
