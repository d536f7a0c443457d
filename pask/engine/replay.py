"""Judges a policy on a known answer: all its positions in one pass, generation only from there on
where the policy would have chosen otherwise.

A policy whose levels follow from tokens alone decides, for a known answer, what every position
sees. So the answer's positions can be computed together. Where the policy's choice is the answer's
at every open position, generating under the policy would have given this answer; else the first
other choice is what generating would have chosen, and it goes on from there one step at a time.
This is exact: a position sees the same keys and values, in the same operation, as it would have
when decoded alone.

What a policy cannot change is not computed again. A token at a lower level is still seen exactly
by the `recent` positions after it, so all positions up to there are the trace's, and so are the
layers below the first that the policy touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from pask.engine.answer import Answer, settle
from pask.engine.ask import levels_of, placement
from pask.engine.batch import Batch
from pask.engine.constraint import best
from pask.engine.generation import Generation, Limits, Task
from pask.engine.kv_plan import Run
from pask.engine.kv_seat import Seat
from pask.engine.kv_step import Step
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.engine.prefill import Prepared, prepare
from pask.engine.trace import Trace, record_trace
from pask.methods.contract import Captures, Method, Placement, Wants
from pask.methods.levels import Level

Named = tuple[str, Method]


@dataclass(frozen=True)
class Replayed:
    """What `generate` would have given for a trace's request under a method, and what it took.

    `first_difference` is the choice at which the answer leaves the trace's, None where it is the
    same; `token_layers` were forwarded, the trace's own not among them.
    """

    generation: Generation
    first_difference: int | None
    token_layers: int


@dataclass
class _Job:
    """A method on a trace, its prompt placed and the final level of every fed token decided."""

    trace: Trace
    named: Named
    seat: Seat
    levels: np.ndarray | None  # int8 [fed, layers]; None: all at HIGH
    first_layer: int  # what is computed anew: these layers and above,
    first_row: int  # in this row and after
    prompt_bytes: int
    resident: list[int] = field(default_factory=list)  # bytes after each fed row
    token_layers: int = 0

    @property
    def known(self) -> slice:
        """Rows whose keys and values are the trace's in all layers."""
        return slice(0, self.first_row)

    @property
    def changed(self) -> slice:
        return slice(self.first_row, self.trace.fed)

    def run(self, rows: slice) -> Run:
        levels = None if self.levels is None else self.levels[rows]
        return Run(self.seat, levels, rows.stop - rows.start)


@dataclass
class _Open:
    """A replay whose answer is being written on, or is whole."""

    answer: Answer
    job: _Job
    first_difference: int | None
    replayed: int  # tokens fed by the pass


class Replayer:
    """Replays over one model and store; a trace's prompt stays in the store until it is freed."""

    def __init__(self, model: LoadedModel, store: KVStore, limits: Limits) -> None:
        self._model, self._store, self._limits = model, store, limits
        self._vocabulary: Sequence[bytes] = tokenizer_info(model).decoded_vocab
        self._layers = model.layout.layers

    def trace(self, task: Task, tokens: Sequence[int]) -> Trace:
        """Read a task's request and an answer to it under Full KV; errors as `record_trace`."""
        return record_trace(
            self._model,
            self._store,
            self._vocabulary,
            task.request,
            tokens,
            self._limits,
            expected_new_tokens=task.expected_new_tokens,
        )

    def free(self, trace: Trace) -> None:
        """Give a trace's prompt back to the store."""
        self._store.free(trace.prompt)

    @torch.inference_mode()
    def replay(
        self, trace: Trace, methods: Iterable[Named], *, max_batch: int = 32
    ) -> Iterator[Replayed]:
        """The outcome of each (entry name, method), in no promised order.

        ValueError for a method that acts on more than tokens, tags and labels.
        """
        batch = Batch(self._model.transformer, self._store)
        waiting = iter(methods)
        running: list[_Open] = []
        while True:
            jobs = [self._job(trace, named) for named in islice(waiting, max_batch)]
            for first_layer in sorted({job.first_layer for job in jobs}):
                running += self._judge([job for job in jobs if job.first_layer == first_layer])
            last = len(jobs) < max_batch
            while running and (last or len(running) >= max_batch):
                for ended in [one for one in running if one.answer.done]:
                    yield self._close(ended)
                running = [one for one in running if not one.answer.done]
                if running:
                    batch.step([one.answer for one in running])
            if last:
                return

    def _job(self, trace: Trace, named: Named) -> _Job:
        """Place the trace's prompt as a method wants it and decide its levels for all tokens."""
        prepared = self._prepared(trace, named)
        (state,), info, (who,) = prepared.states, prepared.info, prepared.who
        if state.evicts or state.choice is not None or state.wants != Wants():
            raise ValueError(f"{who}: a method that acts on attention cannot be replayed")
        placements = [
            placement(state, layer, Captures(), info, who) for layer in range(self._layers)
        ]
        levels = None
        if state.acts_on_tokens:
            decided = [levels_of(state, d, self._layers, who) for d in trace.decoded[: trace.fed]]
            levels = np.array(decided, dtype=np.int8).reshape(-1, self._layers)
        seat = self._store.place(
            trace.prompt,
            placements,
            recent=state.recent,
            levels=state.levels,
            normalise=state.shifted_keys,
            acts=state.acts_on_tokens,
            ring_slots=state.recent + trace.fed + 1,
        )
        first_layer, first_row = _first_effect(placements, levels, state.recent, trace.fed)
        return _Job(
            trace=trace,
            named=named,
            seat=seat,
            levels=levels,
            first_layer=first_layer,
            first_row=first_row,
            prompt_bytes=self._store.resident_total(seat),
        )

    def _judge(self, jobs: Sequence[_Job]) -> list[_Open]:
        """Compute what jobs of one first layer change, and open their answers at what follows."""
        self._feed_known([job for job in jobs if job.first_row])
        computed = [job for job in jobs if job.first_row < job.trace.fed]
        hidden = self._feed_changed(computed) if computed else None
        chosen = [list(job.trace.chosen) for job in jobs]
        if hidden is not None:
            open_rows, masks, places = [], [], []
            start = 0
            for job in computed:
                for row in range(job.first_row, job.trace.fed):
                    mask = job.trace.masks[row + 1]
                    if mask is not None:
                        open_rows.append(start + row - job.first_row)
                        masks.append(mask)
                        places.append((jobs.index(job), row + 1))
                start += job.trace.fed - job.first_row
            if masks:
                picked = best(masks, self._model.transformer.logits(hidden[open_rows]))
                for (number, choice), token in zip(places, picked, strict=True):
                    chosen[number][choice] = token
        return [self._open(job, tokens) for job, tokens in zip(jobs, chosen, strict=True)]

    def _feed_known(self, jobs: Sequence[_Job]) -> None:
        """Give the seats the trace's keys and values of the rows before any effect."""
        if not jobs:
            return
        step = self._store.begin([job.run(job.known) for job in jobs])
        for layer in range(self._layers):
            step.append(layer, *_of_trace(jobs, layer, [job.known for job in jobs]))
        self._finish(step, jobs)

    def _feed_changed(self, jobs: Sequence[_Job]) -> torch.Tensor:
        """Compute the other rows from the jobs' first layer on; what the head takes of them."""
        rows = [job.changed for job in jobs]
        first_layer = jobs[0].first_layer
        step = self._store.begin(
            [job.run(changed) for job, changed in zip(jobs, rows, strict=True)]
        )
        for layer in range(first_layer):
            step.append(layer, *_of_trace(jobs, layer, rows))
        transformer = self._model.transformer
        x = torch.cat([job.trace.inputs[first_layer][job.changed] for job in jobs])
        positions = [
            len(job.trace.request.prompt_ids) + row
            for job in jobs
            for row in range(job.first_row, job.trace.fed)
        ]
        x = transformer.forward(x, positions, step.attend, first_layer=first_layer)
        self._finish(step, jobs)
        for job in jobs:
            job.token_layers += (job.trace.fed - job.first_row) * (self._layers - first_layer)
        return x

    def _finish(self, step: Step, jobs: Sequence[_Job]) -> None:
        step.finish()
        held = step.resident_bytes.tolist()
        for number, job in enumerate(jobs):
            rows = step.rows_of(number)
            job.resident += held[rows]

    def _open(self, job: _Job, chosen: Sequence[int]) -> _Open:
        """The answer that follows from the choices: the trace's, or the beginning of another."""
        trace = job.trace
        differs = _first_difference(trace, chosen, self._model.stop_token_ids)
        prepared = self._prepared(trace, job.named)  # a state that has seen no token yet
        answer = Answer(
            prepared, 0, job.seat, self._store, self._vocabulary, self._limits, job.prompt_bytes
        )
        kept = len(trace.tokens) if differs is None else differs
        for token in trace.tokens[:kept]:
            answer.accept(token)
        if differs is not None or trace.ended:
            answer.accept(chosen[kept])
        fed = min(kept, trace.fed)
        if fed < trace.fed:
            self._store.truncate(job.seat, fed)
        answer.took(job.resident[:fed], None)
        settle([answer], self._model.layout.vocab_size)
        return _Open(answer, job, differs, fed)

    def _close(self, ended: _Open) -> Replayed:
        generation = ended.answer.result()
        self._store.free(ended.job.seat)
        more = (ended.answer.fed - ended.replayed) * self._layers
        return Replayed(generation, ended.first_difference, ended.job.token_layers + more)

    def _prepared(self, trace: Trace, named: Named) -> Prepared:
        task = Task(trace.request, (named,), trace.expected_new_tokens)
        return prepare(self._model, task, self._limits, self._store.page_slots)


def _of_trace(
    jobs: Sequence[_Job], layer: int, rows: Sequence[slice]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The traces' keys and values of each job's rows in a layer, [rows, kv_heads, head_dim]."""
    pairs = list(zip(jobs, rows, strict=True))
    keys = torch.cat([job.trace.keys[layer][these] for job, these in pairs])
    return keys, torch.cat([job.trace.values[layer][these] for job, these in pairs])


def _first_effect(
    placements: Sequence[Placement], levels: np.ndarray | None, recent: int, fed: int
) -> tuple[int, int]:
    """The first layer and the first row that a policy changes; (layers, fed) where it changes none.

    A prompt token below HIGH is felt by every row; a decoded one by those after its window.
    """
    layers = len(placements)
    first_layer = next((n for n, p in enumerate(placements) if p.tokens is not None), layers)
    first_row = 0 if first_layer < layers else fed
    if levels is not None:
        felt = levels[: max(0, fed - recent - 1)] != Level.HIGH
        if felt.any():
            first_layer = min(first_layer, int(felt.any(axis=0).argmax()))
            first_row = min(first_row, int(felt.any(axis=1).argmax()) + recent + 1)
    return first_layer, first_row


def _first_difference(
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
