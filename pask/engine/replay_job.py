"""A policy laid on a trace: its prompt placed, the levels of all tokens decided, and from where on
anything can be different."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pask.engine.ask import levels_of, placement
from pask.engine.generation import Limits, Task
from pask.engine.kv_plan import Run
from pask.engine.kv_seat import Pool, Seat
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel
from pask.engine.prefill import Prepared, prepare, room
from pask.engine.trace import Trace
from pask.methods.contract import Captures, Method, Placement, Wants
from pask.methods.levels import Level

Named = tuple[str, Method]

GiveUp = Callable[[str], bool]
"""Whether an answer that begins with this text (whole characters) need not be written on."""


@dataclass(frozen=True)
class Asked:
    """A method, by its entry's name, that is to be judged on a trace."""

    trace: Trace
    named: Named
    give_up: GiveUp | None = None


@dataclass(eq=False)
class Job:
    """A method on a trace, ready to be judged.

    `levels`: int8 [fed, layers], None for all at HIGH. Computed anew are the layers from
    `first_layer` on, in the rows from `first_row` on. `resident`: bytes after each row fed so far.
    `changes`: see `pask.engine.replay.Replayed`, of the layers computed so far.
    """

    trace: Trace
    named: Named
    seat: Seat
    levels: np.ndarray | None
    first_layer: int
    first_row: int
    prompt_bytes: int
    give_up: GiveUp | None = None
    resident: list[int] = field(default_factory=list)
    changes: dict[int, float] = field(default_factory=dict)
    token_layers: int = 0

    @property
    def known(self) -> slice:
        """Rows whose keys and values are the trace's in all layers."""
        return slice(0, self.first_row)

    @property
    def changed(self) -> slice:
        return slice(self.first_row, self.trace.fed)

    def compare(self, layer: int, outputs: torch.Tensor) -> None:
        """Note what a layer's attention gave for the changed rows, [rows, q_heads, head_dim]."""
        change = (outputs - self.trace.outputs[layer][self.changed]).square().sum(-1)
        self.changes[layer] = float(change.amax(-1).double().sum())

    def run(self, rows: slice) -> Run:
        levels = None if self.levels is None else self.levels[rows]
        return Run(self.seat, levels, rows.stop - rows.start)


def prepared_for(
    model: LoadedModel, store: KVStore, trace: Trace, named: Named, limits: Limits
) -> tuple[Prepared, list[Placement]]:
    """A fresh state of the method, and where it places each layer's prompt.

    ValueError for a method that acts on more than tokens, tags and labels.
    """
    task = Task(trace.request, (named,), trace.expected_new_tokens)
    prepared = prepare(model, task, limits, store.page_slots)
    (state,), info, (who,) = prepared.states, prepared.info, prepared.who
    if state.evicts or state.choice is not None or state.wants != Wants():
        raise ValueError(f"{who}: a method that acts on attention cannot be replayed")
    return prepared, [
        placement(state, layer, Captures(), info, who) for layer in range(info.layers)
    ]


def slots_for(prepared: Prepared, trace: Trace, limits: Limits, page_slots: int) -> dict[Pool, int]:
    """Slots at each level that a job can need, its prompt's own ones and its ring included."""
    tokens = prepared.info.prompt_tokens + limits.max_new_tokens
    slots = room(prepared.states[0], tokens, page_slots)
    slots[Level.HIGH] += trace.fed + page_slots
    return slots


def lay(
    prepared: Prepared,
    placements: Sequence[Placement],
    store: KVStore,
    trace: Trace,
    named: Named,
    limits: Limits,
    give_up: GiveUp | None = None,
) -> Job:
    """Decide the final level of every token, and take a seat with the prompt as it is placed."""
    (state,), info, (who,) = prepared.states, prepared.info, prepared.who
    levels = None
    if state.acts_on_tokens:
        decided = [levels_of(state, d, info.layers, who) for d in trace.decoded[: trace.fed]]
        levels = np.array(decided, dtype=np.int8).reshape(-1, info.layers)
    seat = store.place(
        trace.prompt,
        placements,
        recent=state.recent,
        levels=state.levels,
        normalise=state.shifted_keys,
        channel_keys=state.channel_keys,
        acts=state.acts_on_tokens,
        ring_slots=state.recent + trace.fed + 1,
    )
    store.reserve(seat, slots_for(prepared, trace, limits, store.page_slots))
    first_layer, first_row = first_effect(placements, levels, trace.fed)
    return Job(
        *(trace, named, seat, levels, first_layer, first_row),
        prompt_bytes=store.resident_total(seat),
        give_up=give_up,
    )


def first_effect(
    placements: Sequence[Placement], levels: np.ndarray | None, fed: int
) -> tuple[int, int]:
    """The first layer and the first row that a policy touches; (layers, fed) where it touches none.

    A prompt token below HIGH is felt by every row. A decoded one is felt by itself already: its
    value stays until it leaves the recent window, but it lies in another region from the start, so
    that a row's sums run in another order.
    """
    layers = len(placements)
    first_layer = next((n for n, p in enumerate(placements) if p.tokens is not None), layers)
    first_row = 0 if first_layer < layers else fed
    if levels is not None:
        low = levels != Level.HIGH
        if low.any():
            first_layer = min(first_layer, int(low.any(axis=0).argmax()))
            first_row = min(first_row, int(low.any(axis=1).argmax()))
    return first_layer, first_row


def of_traces(
    jobs: Sequence[Job], layer: int, rows: Sequence[slice]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The traces' keys and values of each job's rows in a layer, [rows, kv_heads, head_dim]."""
    pairs = list(zip(jobs, rows, strict=True))
    keys = torch.cat([job.trace.keys[layer][these] for job, these in pairs])
    return keys, torch.cat([job.trace.values[layer][these] for job, these in pairs])


def first_difference(
    trace: Trace, chosen: Sequence[int], stop_token_ids: Sequence[int]
) -> int | None:
    """The first choice that is not the trace's answer's."""
    for choice, token in enumerate(chosen):
        if choice < len(trace.tokens):
            if token != trace.tokens[choice]:
                return choice
        elif token not in stop_token_ids:
            return choice
    return None
