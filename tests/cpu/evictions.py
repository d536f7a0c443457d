"""Two drivers for methods that evict: by made-up attention, and a dense decoder as the oracle.

Both ask a `Rule`, a slow second form of a method, what stays in one layer. It is given plain
numbers (the mean over each query group) and keeps its own books.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import torch
import xgrammar as xgr
from transformers import AttentionInterface, AutoModelForCausalLM

from pask.engine.constraint import LegalTokens, best
from pask.methods.contract import Captures, Decoded, PromptInfo, RequestState
from pask.methods.levels import Level
from tests.cpu.tiny import VOCAB_SIZE
from tests.cpu.toys import SomeRequest

Rows = list[list[Fraction]]  # [kv_heads][tokens]
Held = list[set[int]]  # resident tokens by kv head


class Rule(Protocol):
    """One layer of one request; `prompt` first, then `step` for every decoded token."""

    def prompt(self, mass: Rows) -> Held: ...

    def step(self, mass: Rows, token: bytes) -> Held: ...


def fractions(mass: torch.Tensor, group_size: int) -> Rows:
    return [[Fraction(x) / group_size for x in row] for row in mass.tolist()]


class Driven:
    """A state that is driven without an engine; `held` is what it leaves, [layer][kv head]."""

    def __init__(self, state: RequestState, info: PromptInfo) -> None:
        self.state, self.info, self.tokens = state, info, info.prompt_tokens
        self.held: list[Held] = []

    def place(self, masses: Sequence[torch.Tensor]) -> list[Held]:
        """`masses`: [q_heads, prompt] of each layer."""
        for layer, mass in enumerate(masses):
            captured = mass.clone() if self.state.wants.prompt_mass else None
            placement = self.state.place(layer, Captures(prompt_mass=captured))
            placement.check(self.info, self.state.levels)
            if placement.tokens is None:
                rows = [list(range(self.tokens))] * self.info.kv_heads
            else:
                assert set(placement.tokens) == {Level.HIGH}
                rows = placement.tokens[Level.HIGH].tolist()
            self.held.append([set(row) for row in rows])
        return self.held

    def step(self, mass: torch.Tensor, text: bytes = b"x") -> torch.Tensor | None:
        """`mass` [layers, kv_heads, tokens + 1], summed over the query group; what is not resident
        is made 0. What was dropped, [layers, kv_heads, n] or None."""
        index = self.tokens - self.info.prompt_tokens
        self.state.accepted(Decoded(index, 0, text, None))
        self.tokens += 1
        mass = mass.clone()
        for layer, heads in enumerate(self.held):
            for head, held in enumerate(heads):
                held.add(self.tokens - 1)
                mass[layer, head, sorted(set(range(self.tokens)) - held)] = 0
        dropped = self.state.evict(self.tokens, mass if self.state.wants.step_mass else None)
        if dropped is None:
            return None
        assert dropped.dtype == torch.int64
        assert dropped.shape[:2] == (self.info.layers, self.info.kv_heads)
        for layer, heads in enumerate(self.held):
            for head, held in enumerate(heads):
                for token in dropped[layer, head].tolist():
                    held.remove(token)  # KeyError where it is not resident
        return dropped


def same_as_rules(
    state: RequestState, info: PromptInfo, rules: Sequence[Rule], seed: int, texts: Sequence[bytes]
) -> None:
    """Drive a state and its second form by the same random attention and compare what stays; a step
    for each of `texts`. Eighths are exact in binary, so that equal sums are equal in both."""
    draw = torch.Generator().manual_seed(seed)
    driven = Driven(state, info)
    q_heads = info.kv_heads * info.group_size
    masses = [
        torch.randint(0, 9, (q_heads, info.prompt_tokens), generator=draw) / 8
        for _ in range(info.layers)
    ]
    grouped = [m.view(info.kv_heads, info.group_size, -1).sum(dim=1) for m in masses]
    expected = [
        rule.prompt(fractions(mass, info.group_size))
        for rule, mass in zip(rules, grouped, strict=True)
    ]
    assert driven.place(masses) == expected
    for number, text in enumerate(texts):
        tokens = info.prompt_tokens + number + 1
        mass = torch.randint(0, 9, (info.layers, info.kv_heads, tokens), generator=draw) / 8
        driven.step(mass, text)
        expected = [
            rule.step(fractions(one, info.group_size), text)
            for rule, one in zip(rules, mass, strict=True)
        ]
        assert driven.held == expected, f"after {tokens} tokens"


class DenseDecoder:
    """transformers' model over the whole text at every step; what a rule dropped is masked."""

    def __init__(self, folder: Path) -> None:
        name = f"dense_eviction_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=name
        )
        config = self._model.config
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.group_size = config.num_attention_heads // self.kv_heads
        self._masks, self._weights = torch.empty(0), [torch.empty(0)]

    def answer(
        self,
        request: SomeRequest,
        rules: Sequence[Rule],
        vocabulary: Sequence[bytes],
        max_new_tokens: int,
    ) -> tuple[int, ...]:
        """The tokens of a greedy answer under the request's grammar, one rule a layer."""
        ids, answer = list(request.prompt_ids), list[int]()
        visible = torch.full((len(ids), len(ids)), -torch.inf).triu(1)
        visible = visible.repeat(self.layers, self.kv_heads, 1, 1)
        logits = self._logits(ids, visible)
        held = [
            rule.prompt(self._grouped(weights.sum(dim=1)))
            for rule, weights in zip(rules, self._weights, strict=True)
        ]
        matcher = xgr.GrammarMatcher(request.grammar)
        while True:
            mask = LegalTokens([matcher], VOCAB_SIZE).mask(0)
            (token,) = best([mask], logits[None].clone(), [request.id])
            assert matcher.accept_token(token)
            if matcher.is_terminated():
                return tuple(answer)
            answer.append(token)
            if len(answer) == max_new_tokens:
                return tuple(answer)
            ids.append(token)
            visible = torch.nn.functional.pad(visible, (0, 1, 0, 1), value=-torch.inf)
            for layer, heads in enumerate(held):
                for head, seen in enumerate(heads):
                    visible[layer, head, -1, [*seen, len(ids) - 1]] = 0.0
            logits = self._logits(ids, visible)
            held = [
                rule.step(self._grouped(weights[:, -1]), vocabulary[token])
                for rule, weights in zip(rules, self._weights, strict=True)
            ]

    def _grouped(self, mass: torch.Tensor) -> Rows:
        """[q_heads, tokens] summed over each group, then as the mean."""
        summed = mass.view(self.kv_heads, self.group_size, -1).double().sum(dim=1)
        return fractions(summed, self.group_size)

    def _logits(self, ids: list[int], visible: torch.Tensor) -> torch.Tensor:
        self._masks, self._weights = visible.repeat_interleave(self.group_size, dim=1), []
        with torch.no_grad():
            found: torch.Tensor = self._model(torch.tensor([ids])).logits[0, -1]
        return found

    def _attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        k, v = (part[0].repeat_interleave(self.group_size, 0) for part in (k, v))
        scores = q[0] @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + self._masks[module.layer_idx]
        weights = scores.softmax(-1)
        self._weights.append(weights)
        return (weights @ v).transpose(0, 1)[None], None
