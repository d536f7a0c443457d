"""The bytes that a method would hold at the end of known answers, without computing any.

The store is the real one and so are the method's own decisions; the keys and values put into it
are zeros, and the attention that a method asks for is noise (the same in every run). So bytes are
counted as in an evaluation wherever they do not depend on what attention was paid to: for every
method whose attention decides which tokens stay, and not how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pask.engine.answer import evict
from pask.engine.ask import evicted, levels_of, placement, tell
from pask.engine.decode import new_store
from pask.engine.generation import Limits, Request, Task
from pask.engine.kv_plan import Run
from pask.engine.kv_seat import Seat
from pask.engine.kv_store import KVStore
from pask.engine.loading import ModelFiles
from pask.engine.prefill import Prepared, prepare
from pask.engine.trace import decoded_tokens
from pask.methods.contract import UNREACHABLE, Captures, Decoded, Method

TOGETHER = 32
"""Answers in the store at once."""

_LONGEST_RUN = 64


@dataclass(frozen=True)
class Case:
    """A request and an answer to it; `cut_off`: it ended at the limit, so that its last token was
    never fed."""

    request: Request
    tokens: tuple[int, ...]
    cut_off: bool
    expected_new_tokens: int


@dataclass(frozen=True)
class Counted:
    """Bytes at the end of the answers, all together; `unreachable`: how many of the requests the
    method says it holds above its knob's value."""

    resident: int
    full: int
    unreachable: int

    @property
    def share(self) -> float:
        """B_persist."""
        return self.resident / self.full


def count(
    model: ModelFiles,
    method: Method,
    cases: Sequence[Case],
    limits: Limits,
    kv_dtype: torch.dtype,
    page_slots: int = 16,
) -> Counted:
    """Count a method's bytes over `cases`; errors as `pask.engine.decode.generate`."""
    longest = max(len(case.request.prompt_ids) for case in cases) + limits.max_new_tokens
    # Twice: any token may be at HIGH or lower, chunk summaries and rings take pages too.
    store = new_store(
        model,
        seats=TOGETHER,
        capacity_tokens=2 * TOGETHER * (longest + page_slots),
        kv_dtype=kv_dtype,
        page_slots=page_slots,
    )
    resident = full = unreachable = 0
    for start in range(0, len(cases), TOGETHER):
        answers = [_Answer(model, method, case, store, limits) for case in cases[start:][:TOGETHER]]
        with torch.inference_mode():
            for answer in answers:
                answer.place()
            while running := [answer for answer in answers if answer.left]:
                _feed(store, running)
        for answer in answers:
            resident += store.resident_total(answer.seat)
            full += store.full_bytes(answer.info.prompt_tokens, answer.fed)
            unreachable += UNREACHABLE in answer.state.notes
            store.free(answer.seat)
    return Counted(resident, full, unreachable)


class _Answer:
    """One case in the store."""

    def __init__(
        self, model: ModelFiles, method: Method, case: Case, store: KVStore, limits: Limits
    ) -> None:
        task = Task(case.request, ((method.name, method),), case.expected_new_tokens)
        prepared: Prepared = prepare(model, task, limits, store.page_slots)
        (self.state,), self.info, (self.who,) = prepared.states, prepared.info, prepared.who
        self.fed, self._fed_at_end = 0, len(case.tokens) - case.cut_off
        self._decoded = decoded_tokens(model.token_texts, case.request, case.tokens)
        self._store = store
        self._noise = torch.Generator().manual_seed(self.info.prompt_tokens)
        self.seat: Seat = store.open(
            self.info.prompt_tokens,
            recent=self.state.recent,
            levels=self.state.levels,
            normalise=self.state.shifted_keys,
            channel_keys=self.state.channel_keys,
            acts=self.state.acts_on_tokens,
            choice=self.state.choice,
        )
        total = self.info.prompt_tokens + self._fed_at_end
        self._resident = torch.zeros(self.info.layers, self.info.kv_heads, total, dtype=torch.bool)

    @property
    def left(self) -> int:
        return self._fed_at_end - self.fed

    def place(self) -> None:
        info = self.info
        shape = (info.kv_heads, info.prompt_tokens, info.head_dim)
        nothing = torch.zeros(shape)
        for layer in range(info.layers):
            answer = placement(self.state, layer, self._captures(), info, self.who)
            self._store.add_prompt([self.seat], layer, nothing, nothing, answer)
            if answer.tokens is None:
                self._resident[layer, :, : info.prompt_tokens] = True
            else:
                for kept in answer.tokens.values():
                    self._resident[layer].scatter_(1, kept, True)

    def run(self) -> Run:
        if self.state.evicts:
            tell(self.state, self._decoded[self.fed], self.who)
        rows = 1 if self.state.evicts else min(self.left, self.seat.longest_run, _LONGEST_RUN)
        levels = None
        if self.state.acts_on_tokens:
            decided = [self._levels(d) for d in self._decoded[self.fed : self.fed + rows]]
            levels = np.array(decided, dtype=np.int8)
        return Run(self.seat, levels, rows)

    def took(self, rows: int) -> torch.Tensor | None:
        """Answers the tokens that the method drops now."""
        self.fed += rows
        if not self.state.evicts:
            return None
        tokens = self.info.prompt_tokens + self.fed
        self._resident[:, :, tokens - 1] = True
        mass = None
        if self.state.wants.step_mass:
            noise = torch.rand(tokens, generator=self._noise) * self._resident[:, :, :tokens]
            mass = noise * (self.info.group_size / noise.sum(dim=-1, keepdim=True))
        dropped = evicted(self.state, tokens, mass, self.info, self.who)
        if dropped is not None:
            self._resident.scatter_(2, dropped, False)
        return dropped

    def _levels(self, decoded: Decoded) -> tuple[int, ...]:
        return levels_of(self.state, decoded, self.info.layers, self.who)

    def _captures(self) -> Captures:
        info, wants = self.info, self.state.wants
        q_heads = info.kv_heads * info.group_size
        noise = torch.rand(q_heads, info.prompt_tokens, generator=self._noise)
        noise /= noise.sum(dim=-1, keepdim=True)
        return Captures(
            window_mass=noise * wants.window_queries if wants.window_queries else None,
            prompt_mass=noise * info.prompt_tokens if wants.prompt_mass else None,
        )


def _feed(store: KVStore, running: Sequence[_Answer]) -> None:
    """One step of all answers: their next tokens are stored, and what they drop is dropped."""
    runs = [answer.run() for answer in running]
    step = store.begin(runs)
    shape = store.shape
    nothing = torch.zeros(sum(run.length for run in runs), shape.kv_heads, shape.head_dim)
    for layer in range(shape.layers):
        step.append(layer, nothing, nothing)
    step.finish()
    dropped = [answer.took(run.length) for answer, run in zip(running, runs, strict=True)]
    evict(store, [a.seat for a in running], dropped, [a.who for a in running])
