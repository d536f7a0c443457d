"""Judges a policy on a known answer: all its positions in one pass, generation only from there on
where the policy would have chosen otherwise.

A policy whose levels follow from tokens alone decides, for a known answer, what every position
sees. So the answer's positions can be computed together. Where the policy's choice is the answer's
at every open position, generating under the policy would have given this answer; else the first
other choice is what generating would have chosen, and it goes on from there one step at a time.
This is exact: a position reads the same bits in the same order as it would have when decoded alone.

What a policy cannot change is not computed again: the positions before the first token that does
not end at HIGH, and the layers below the first that the policy touches, are the trace's.

Who asks only whether an answer is right need not have it written to its end: `give_up` tells from
when on it cannot be.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from pask.engine.answer import Answer, settle
from pask.engine.batch import Batch
from pask.engine.constraint import best
from pask.engine.generation import Generation, Limits, Task
from pask.engine.kv_seat import Seat
from pask.engine.kv_step import Step
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel
from pask.engine.prefill import Prepared
from pask.engine.replay_job import (
    Asked,
    GiveUp,
    Job,
    Named,
    first_difference,
    lay,
    of_traces,
    prepared_for,
    slots_for,
)
from pask.engine.replay_open import Open, Waiting
from pask.engine.trace import Trace, record_trace
from pask.errors import PaskError
from pask.methods.contract import Placement
from pask.methods.levels import Level

LOGIT_ROWS = 256
"""Rows whose logits exist at once: a whole vocabulary each."""


@dataclass(frozen=True)
class Replayed:
    """What `generate` would have given for a trace's request under a method, and what it took.

    `first_difference` is the choice at which the answer leaves the trace's, None where it is the
    same; `token_layers` were forwarded, the trace's own not among them. `changes` by layer: the
    squared change of attention's output by what the method does in this layer and below, of the
    worst query head, summed over the rows of the trace's own answer. `given_up`: the generation
    breaks off where `give_up` said so. It counts as cut off by the limit, and its bytes are those
    of what was fed until then.
    """

    generation: Generation
    first_difference: int | None
    token_layers: int
    changes: tuple[float, ...]
    given_up: bool = False


class Replayer:
    """Replays over one model and store; a trace's prompt stays in the store until it is freed.

    After an error in the middle of a step the store is of no use any more.
    """

    def __init__(self, model: LoadedModel, store: KVStore, limits: Limits) -> None:
        self._model, self._store, self._limits = model, store, limits
        self._vocabulary: Sequence[bytes] = model.token_texts
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

    def room_beside(self, task: Task, others: Iterable[Task]) -> bool:
        """Whether a trace of `task` fits beside those of `others`, with room for a replay on any
        of them, whatever else is under way. What it tells is on the safe side."""
        longest, page = self._limits.max_new_tokens, self._store.page_slots
        prompt = len(task.request.prompt_ids)
        most = max(len(one.request.prompt_ids) for one in (task, *others))
        # Slots: of the trace its prompt and answer; of a replay the prompt, placed and promised,
        # and three answers: new tokens, the trace's, and the ring. Pages may be partly filled.
        needed = prompt + longest + 2 * most + 3 * longest + 12 * page
        return self._store.room_for({Level.HIGH: needed}) and self._store.seats.count(None) > 2

    def replay(
        self,
        trace: Trace,
        methods: Iterable[Named],
        *,
        max_batch: int = 32,
        give_up: GiveUp | None = None,
    ) -> Generator[Replayed, None, None]:
        """The outcome of each (entry name, method) on one trace: see `replay_all`."""
        asked = (Asked(trace, named, give_up) for named in methods)
        return self.replay_all(asked, max_batch=max_batch)

    @torch.inference_mode()
    def replay_all(
        self, asked: Iterable[Asked | None], *, max_batch: int = 32
    ) -> Generator[Replayed, None, None]:
        """The outcome of each method on its trace, in no promised order.

        Answers to several requests are written on together. `asked` may read further traces as it
        goes, and say None for nothing more until another outcome has come; with no outcome
        outstanding it must not. An answer that is written on ends where its `give_up` is True of
        its text so far; it is asked whenever a choice is open.
        ValueError for a method that acts on more than tokens, tags and labels; PaskError where the
        store cannot hold one replay beside the traces.
        """
        if max_batch < 1:
            raise ValueError("max_batch must be at least 1")
        batch = Batch(self._model.transformer, self._store)
        waiting = Waiting(asked)
        running: list[Open] = []
        seats: list[Seat] = []  # of all that is under way
        try:
            while True:
                jobs = self._jobs(waiting, max_batch - len(running), seats)
                for first_layer in sorted({job.first_layer for job in jobs}):
                    running += self._judge([job for job in jobs if job.first_layer == first_layer])
                for one in running:
                    one.ask(self._vocabulary)
                for one in [one for one in running if one.ended]:
                    running.remove(one)
                    seats.remove(one.job.seat)
                    yield self._close(one)
                if not running and waiting.first() is None and waiting.ended:
                    return
                # Answers that go on wait for company while there is more to judge.
                if running and (not jobs or len(running) == max_batch):
                    batch.step([one.answer for one in running])
        finally:
            for seat in seats:
                with suppress(ValueError):  # of a step that broke off
                    self._store.free(seat)

    def _jobs(self, waiting: Waiting, most: int, seats: list[Seat]) -> list[Job]:
        """The next `most` that are waiting as jobs, or as many as the store has room for."""
        jobs: list[Job] = []
        while len(jobs) < most and (asked := waiting.first()) is not None:
            trace, named = asked.trace, asked.named
            if trace.limit != self._limits.max_new_tokens:
                raise ValueError(f"the trace was made for at most {trace.limit} new tokens")
            prepared, placements = self._prepared(trace, named)
            slots = slots_for(prepared, trace, self._limits, self._store.page_slots)
            # These are promised beside what the prompt takes when it is placed; a job that is alone
            # may try with less.
            beside = prepared.info.prompt_tokens + 4 * self._store.page_slots if seats else 0
            needed = {name: count + beside for name, count in slots.items()}
            if not self._store.room_for(needed) or None not in self._store.seats:
                if not seats:
                    raise PaskError(
                        f"a replay may need a seat and {slots[Level.HIGH]} slots, not free",
                        where=prepared.who[0],
                        why=f"the store holds {self._store.capacity(Level.HIGH)} tokens",
                        todo="raise engine.kv_capacity_tokens",
                    )
                break
            jobs.append(
                lay(prepared, placements, self._store, trace, named, self._limits, asked.give_up)
            )
            seats.append(jobs[-1].seat)
            waiting.take()
        return jobs

    def _prepared(self, trace: Trace, named: Named) -> tuple[Prepared, list[Placement]]:
        return prepared_for(self._model, self._store, trace, named, self._limits)

    def _judge(self, jobs: Sequence[Job]) -> list[Open]:
        """Compute what jobs of one first layer change, and open their answers at what follows."""
        self._feed_known([job for job in jobs if job.first_row])
        computed = [job for job in jobs if job.first_row < job.trace.fed]
        chosen = [list(job.trace.chosen) for job in jobs]
        if computed:
            hidden = self._feed_changed(computed)
            rows: list[int] = []  # those whose choice is open, with where it belongs
            choices: list[tuple[int, int]] = []
            start = 0
            for job in computed:
                number = jobs.index(job)
                for row in range(job.first_row, job.trace.fed):
                    if job.trace.masks[row + 1] is not None:
                        rows.append(start + row - job.first_row)
                        choices.append((number, row + 1))
                start += job.trace.fed - job.first_row
            for at in range(0, len(rows), LOGIT_ROWS):
                some = choices[at : at + LOGIT_ROWS]
                logits = self._model.transformer.logits(hidden[rows[at : at + LOGIT_ROWS]])
                masks = [jobs[number].trace.masks[choice] for number, choice in some]
                who = [jobs[number].named[0] for number, _ in some]
                picked = best([mask for mask in masks if mask is not None], logits, who)
                for (number, choice), token in zip(some, picked, strict=True):
                    chosen[number][choice] = token
        return [self._open(job, tokens) for job, tokens in zip(jobs, chosen, strict=True)]

    def _feed_known(self, jobs: Sequence[Job]) -> None:
        """Give the seats the trace's keys and values of the rows before any effect."""
        if not jobs:
            return
        rows = [job.known for job in jobs]
        step = self._store.begin([job.run(job.known) for job in jobs])
        for layer in range(self._layers):
            step.append(layer, *of_traces(jobs, layer, rows))
        _finish(step, jobs)

    def _feed_changed(self, jobs: Sequence[Job]) -> torch.Tensor:
        """Compute the other rows from the jobs' first layer on; what the head takes of them."""
        rows = [job.changed for job in jobs]
        first_layer = jobs[0].first_layer
        step = self._store.begin([job.run(job.changed) for job in jobs])
        for layer in range(first_layer):
            step.append(layer, *of_traces(jobs, layer, rows))
        x = torch.cat([job.trace.inputs[first_layer][job.changed] for job in jobs])
        positions = [
            len(job.trace.request.prompt_ids) + row
            for job in jobs
            for row in range(job.first_row, job.trace.fed)
        ]
        counts = [job.trace.fed - job.first_row for job in jobs]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs = step.attend(layer, q, k, v)
            for job, own in zip(jobs, torch.split(outputs, counts), strict=True):
                job.compare(layer, own)
            return outputs

        transformer = self._model.transformer
        x = transformer.forward(x, positions, attend, first_layer=first_layer)
        _finish(step, jobs)
        for job, count in zip(jobs, counts, strict=True):
            job.token_layers += count * (self._layers - first_layer)
        return x

    def _open(self, job: Job, chosen: Sequence[int]) -> Open:
        """The answer that follows from the choices: the trace's, or the beginning of another."""
        trace = job.trace
        differs = first_difference(trace, chosen, self._model.stop_token_ids)
        prepared, _ = self._prepared(trace, job.named)  # a state that has seen no token yet
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
        return Open(answer, job, differs, fed)

    def _close(self, ended: Open) -> Replayed:
        generation = ended.answer.result()
        self._store.free(ended.job.seat)
        more = (ended.answer.fed - ended.replayed) * self._layers
        cost = ended.job.token_layers + more
        changes = tuple(ended.job.changes.get(layer, 0.0) for layer in range(self._layers))
        return Replayed(generation, ended.first_difference, cost, changes, ended.given_up)


def _finish(step: Step, jobs: Sequence[Job]) -> None:
    step.finish()
    held = step.resident_bytes.tolist()
    for number, job in enumerate(jobs):
        job.resident += held[step.rows_of(number)]
