"""Greedy decoding under a grammar: one prefill a request, then all its methods in one batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import xgrammar as xgr

from kernels import window_mass
from pask.engine.ask import kept_tokens, opened
from pask.engine.constraint import LegalTokens
from pask.engine.generation import ByteCounts, Generation, Limits, Request, Task
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.engine.store import RequestKV
from pask.errors import HarnessFault, PaskError
from pask.methods.contract import Captures, PromptInfo, RequestState, Wants
from pask.structure.tags import Tag
from pask.structure.tracker import Tracker


@dataclass
class _Sequence:
    """A request under one entry while it is decoded."""

    task: Task
    entry: str
    state: RequestState
    store: RequestKV
    matcher: xgr.GrammarMatcher
    vocabulary: Sequence[bytes]
    tracker: Tracker | None
    tokens: list[int] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    resident_sum: int = 0
    full_sum: int = 0

    def choose(self, token: int, limits: Limits) -> None:
        """Take the next token: count the bytes it was chosen over, and see whether it ends all."""
        self.resident_sum += sum(self.store.resident_bytes().values())
        self.full_sum += self._full()
        if not self.matcher.accept_token(token):
            raise HarnessFault(
                f"the grammar refused token {token}, which it had called legal",
                where=f"{self.task.request.id} ({self.entry})",
            )
        if self.matcher.is_terminated():
            self.finish = "stop"
            return
        self.tokens.append(token)
        if self.tracker is not None:
            self.tags.append(self._tag(self.tracker, self.vocabulary[token]))
        if len(self.tokens) == limits.max_new_tokens:
            self.finish = "length"

    def _tag(self, tracker: Tracker, token: bytes) -> Tag:
        try:
            return tracker.accept(token)
        except ValueError as error:
            raise HarnessFault(
                f"the tag grammar refused {token!r}, which the grammar had accepted",
                where=f"{self.task.request.id} ({self.entry})",
                why=str(error),
            ) from error

    def result(self) -> Generation:
        assert self.finish is not None
        resident = self.store.resident_bytes()
        # The grammar's own bytes; a character can be cut short by the token limit, and xgrammar
        # lets surrogates through.
        text = b"".join(self.vocabulary[token] for token in self.tokens).decode(errors="replace")
        return Generation(
            request_id=self.task.request.id,
            entry=self.entry,
            token_ids=tuple(self.tokens),
            text=text,
            finish=self.finish,
            prompt_tokens=self.store.info.prompt_tokens,
            bytes=ByteCounts(
                prompt=resident["prompt"],
                decode=resident["decode"],
                full=self._full(),
                full_prompt=self.store.full_prompt_bytes(),
                resident_sum=self.resident_sum,
                full_sum=self.full_sum,
            ),
            notes=self.state.notes,
            tags=tuple(self.tags),
        )

    def _full(self) -> int:
        return self.store.full_bytes(self.store.info.prompt_tokens, self.store.decoded_tokens)


def generate(
    model: LoadedModel,
    tasks: Iterable[Task],
    limits: Limits,
    *,
    max_batch: int = 32,
    kv_dtype: torch.dtype = torch.float16,
    page_slots: int = 16,
) -> Iterator[Generation]:
    """Answer every task under each of its methods, `max_batch` sequences at a time.

    Yields a `Generation` as soon as it ends and frees its memory; the order follows from the
    inputs alone. A request's prompt is read once, with exact attention, and its first token comes
    from the exact logits for every method. PaskError where a prompt does not fit the model or the
    grammar was compiled for another vocabulary; HarnessFault where no token is legal.
    """
    if max_batch < 1:
        raise ValueError("max_batch must be at least 1")
    vocabulary = tokenizer_info(model).decoded_vocab
    upcoming = iter(tasks)
    waiting: deque[_Sequence] = deque()
    running: list[_Sequence] = []
    while True:
        while len(running) < max_batch:
            if not waiting:
                task = next(upcoming, None)
                if task is None:
                    break
                waiting.extend(_begin(model, vocabulary, task, limits, kv_dtype, page_slots))
            running.append(waiting.popleft())
        if not running:
            return
        yield from (sequence.result() for sequence in running if sequence.finish)
        running = [sequence for sequence in running if not sequence.finish]
        if running:
            _step(model, running, limits)


def _step(model: LoadedModel, running: Sequence[_Sequence], limits: Limits) -> None:
    """Feed every sequence its last token and choose its next one."""
    legal = LegalTokens([sequence.matcher for sequence in running], model.layout.vocab_size)
    for sequence, count in zip(running, legal.counts, strict=True):
        if count == 0:
            raise HarnessFault("no token is legal", where=sequence.task.request.id)
    # A row with one legal token has nothing to choose by, so its logits are not computed.
    open_rows = [row for row, count in enumerate(legal.counts) if count > 1]
    logits = model.transformer.decode(
        [sequence.tokens[-1] for sequence in running],
        [sequence.store for sequence in running],
        [count > 1 for count in legal.counts],
    )
    chosen = dict(zip(open_rows, legal.best(open_rows, logits), strict=True))
    for row, sequence in enumerate(running):
        sequence.choose(chosen[row] if row in chosen else legal.only(row), limits)


def _begin(
    model: LoadedModel,
    vocabulary: Sequence[bytes],
    task: Task,
    limits: Limits,
    kv_dtype: torch.dtype,
    page_slots: int,
) -> list[_Sequence]:
    """Read a task's prompt once and open a sequence for each entry, its first token chosen."""
    request, layout = task.request, model.layout
    _check_request(model, request, limits)
    info = PromptInfo(
        prompt_tokens=len(request.prompt_ids),
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        group_size=layout.group_size,
        head_dim=layout.head_dim,
        expected_new_tokens=task.expected_new_tokens,
        page_slots=page_slots,
    )
    sequences = [
        _Sequence(
            task=task,
            entry=entry,
            state=opened(method, info, f"{entry}, row {request.id}"),
            store=RequestKV(info, kv_dtype=kv_dtype, page_slots=page_slots),
            matcher=xgr.GrammarMatcher(request.grammar),
            vocabulary=vocabulary,
            tracker=Tracker(request.tag_grammar) if request.tag_grammar else None,
        )
        for entry, method in task.methods
    ]
    wants = [sequence.state.wants for sequence in sequences]

    def fork(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        captures = {want: _capture(want, q, k) for want in set(wants)}
        for sequence, want in zip(sequences, wants, strict=True):
            who = f"{sequence.entry}, row {request.id}"
            kept = kept_tokens(sequence.state, layer, captures[want], info, who)
            sequence.store.add_prompt(layer, k, v, kept)

    logits = model.transformer.prefill(request.prompt_ids, fork)
    legal = LegalTokens([sequences[0].matcher], layout.vocab_size)
    if legal.counts[0] == 0:
        raise HarnessFault("no first token is legal", where=request.id)
    (first,) = legal.best([0], logits[None])
    for sequence in sequences:
        sequence.choose(first, limits)
    return sequences


def _capture(want: Wants, q: torch.Tensor, k: torch.Tensor) -> Captures:
    mass = window_mass(q, k, want.window_queries) if want.window_queries else None
    return Captures(window_mass=mass)


def _check_request(model: LoadedModel, request: Request, limits: Limits) -> None:
    prompt, layout = len(request.prompt_ids), model.layout
    if not prompt:
        raise PaskError("the prompt is empty", where=request.id)
    if prompt + limits.max_new_tokens > layout.max_positions:
        raise PaskError(
            f"{prompt} prompt tokens and up to {limits.max_new_tokens} new ones do not fit",
            where=request.id,
            why=f"{model.name} has {layout.max_positions} positions",
            todo="shorten the prompt or lower max_new_tokens",
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= layout.vocab_size:
        raise PaskError(
            "a prompt token is outside the vocabulary",
            where=request.id,
            why=f"{model.name} has ids 0..{layout.vocab_size - 1}",
        )
    known = request.grammar.tokenizer_info.vocab_size
    if known != layout.vocab_size:
        raise PaskError(
            f"the grammar was compiled for {known} tokens",
            where=request.id,
            why=f"{model.name} has {layout.vocab_size}",
            todo="compile it with tokenizer_info(model)",
        )
