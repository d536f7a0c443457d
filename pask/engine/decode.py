"""Greedy decoding under a grammar: continuous batching over one store of KV pages.

A request's prompt is read once and shared by all its methods. Then each step feeds every running
answer what it has accepted (a choice and all tokens that the grammar forces after it) and makes
their next choices together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence

import torch

from pask.engine.answer import Answer, settle
from pask.engine.batch import LONGEST_RUN, Batch
from pask.engine.generation import MAX_ENTRIES, Generation, Limits, Task
from pask.engine.kernel_body import kernel_body
from pask.engine.kv_seat import CHANNEL2, KVShape, Pool, pool_slots
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel, ModelFiles
from pask.engine.prefill import Prepared, prefill, prepare, room
from pask.errors import PaskError
from pask.methods.levels import LOW_LEVELS, Level

CAPACITY_TOKENS = 65_536
"""Tokens that the store's pages can hold at each level, unless said otherwise; on a CPU only those
that are used take memory."""


def generate(
    model: LoadedModel,
    tasks: Iterable[Task],
    limits: Limits,
    *,
    max_batch: int = 32,
    kv_dtype: torch.dtype = torch.float16,
    page_slots: int = 16,
    capacity_tokens: int = CAPACITY_TOKENS,
    longest_run: int = LONGEST_RUN,
) -> Generator[Generation, None, None]:
    """Answer every task under each of its methods, `max_batch` answers at a time.

    `capacity_tokens` and `longest_run` (tokens of an answer that one step feeds at most) change
    memory and speed, not results. Yields a `Generation` as soon as it ends and frees its memory;
    the order follows from the inputs alone. A request's prompt is read once, with exact attention,
    and its first token comes from the exact logits for every method. PaskError where a prompt does
    not fit the model or the store, or the grammar was compiled for another vocabulary; HarnessFault
    where no token is legal or a method breaks the contract.
    """
    if max_batch < 1:
        raise ValueError("max_batch must be at least 1")
    store = new_store(
        model,
        seats=max_batch + MAX_ENTRIES,
        capacity_tokens=capacity_tokens,
        kv_dtype=kv_dtype,
        page_slots=page_slots,
    )
    batch = Batch(model.transformer, store, longest_run)
    admission = _Admission(model, store, batch, limits)
    upcoming = map(admission.prepare, tasks)
    next_task = next(upcoming, None)
    waiting: deque[Answer] = deque()
    running: list[Answer] = []
    while True:
        while len(running) < max_batch:
            if not waiting:
                if next_task is None or not admission.has_room(next_task, idle=not running):
                    break
                waiting.extend(admission.begin(next_task))
                next_task = next(upcoming, None)
            running.append(waiting.popleft())
        if not running:
            return
        for answer in [answer for answer in running if answer.done]:
            yield answer.result()
            store.free(answer.seat)
        running = [answer for answer in running if not answer.done]
        if running:
            batch.step(running)


def new_store(
    model: ModelFiles,
    *,
    seats: int,
    capacity_tokens: int = CAPACITY_TOKENS,
    kv_dtype: torch.dtype = torch.float16,
    page_slots: int = 16,
) -> KVStore:
    """A store for `seats` answers of a model; low levels only where its head_dim allows them."""
    kernel_body()  # refuses here, in one line, rather than in the first operation
    layout = model.layout
    pools: list[Pool] = [Level.HIGH]
    if not layout.head_dim % 32:
        pools += [*LOW_LEVELS, CHANNEL2]
    return KVStore.sized(
        KVShape(layout.layers, layout.kv_heads, layout.head_dim),
        capacity_tokens,
        dict.fromkeys(pools, 1.0),
        seats=seats,
        max_tokens=min(layout.max_positions, -(-capacity_tokens // page_slots) * page_slots),
        page_slots=page_slots,
        dtype=kv_dtype,
    )


class _Admission:
    """Lets tasks into the store as far as there is room, and reads their prompts."""

    def __init__(self, model: LoadedModel, store: KVStore, batch: Batch, limits: Limits) -> None:
        self._model, self._store, self._batch, self._limits = model, store, batch, limits
        self._vocabulary: Sequence[bytes] = model.token_texts

    def prepare(self, task: Task) -> Prepared:
        return prepare(self._model, task, self._limits, self._store.page_slots)

    def has_room(self, prepared: Prepared, *, idle: bool) -> bool:
        """Whether the free pages hold a task whatever its methods keep; PaskError where they never
        will, which an `idle` store shows."""
        most: dict[Pool, int] = {}
        for state in prepared.states:
            tokens = prepared.info.prompt_tokens + self._limits.max_new_tokens
            for name, slots in room(state, tokens, self._store.page_slots).items():
                page = pool_slots(name, self._store.page_slots)
                most[name] = most.get(name, 0) + -(-slots // page) * page
        if self._store.room_for(most):
            return True
        if idle:
            raise PaskError(
                f"{most[Level.HIGH]} tokens may be needed at once, the store holds "
                f"{self._store.capacity(Level.HIGH)}",
                where=prepared.task.request.id,
                todo="raise engine.kv_capacity_tokens, or list fewer methods",
            )
        return False

    @torch.inference_mode()
    def begin(self, prepared: Prepared) -> list[Answer]:
        """Read a task's prompt once and open an answer for each entry, its first token chosen."""
        store, limits, info = self._store, self._limits, prepared.info
        seats = []
        for state in prepared.states:
            seat = store.open(
                info.prompt_tokens,
                recent=state.recent,
                levels=state.levels,
                normalise=state.shifted_keys,
                acts=state.acts_on_tokens,
                choice=state.choice,
                channel_keys=state.channel_keys,
            )
            most = info.prompt_tokens + limits.max_new_tokens
            store.reserve(seat, room(state, most, store.page_slots))
            seats.append(seat)
        logits = prefill(self._model, prepared, seats, store)
        for state, seat in zip(prepared.states, seats, strict=True):
            more = room(state, limits.max_new_tokens, store.page_slots, prompt=False)
            store.reserve(seat, more)
        answers = [
            Answer(
                prepared,
                number,
                seat,
                store,
                self._vocabulary,
                limits,
                store.resident_total(seat),
            )
            for number, seat in enumerate(seats)
        ]
        settle(answers, self._model.layout.vocab_size)
        # The prompt's logits choose the first token, if that is open; a forced one is fed first.
        choosing = [a for a in answers if a.mask is not None and not a.to_feed]
        self._batch.choose(choosing, logits.expand(len(choosing), -1).clone())
        return answers
