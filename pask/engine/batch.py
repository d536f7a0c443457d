"""What is done to all running answers at once: feed what they have accepted, and choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pask.engine.answer import Answer, evict, settle
from pask.engine.constraint import best
from pask.engine.kv_store import KVStore
from pask.engine.transformer import Transformer

LONGEST_RUN = 64
"""Tokens of one answer that a step feeds at most, unless said otherwise."""


class Batch:
    """A model and the store that its answers' KV lies in."""

    def __init__(
        self, transformer: Transformer, store: KVStore, longest_run: int = LONGEST_RUN
    ) -> None:
        self._transformer, self._store, self._longest_run = transformer, store, longest_run

    @torch.inference_mode()
    def step(self, running: Sequence[Answer]) -> None:
        """Feed what the answers have accepted, then make the choices that are open."""
        fed, runs = zip(*(answer.next_run(self._longest_run) for answer in running), strict=True)
        rows = [token for tokens in fed for token in tokens]
        positions = [
            run.seat.position + n
            for run, tokens in zip(runs, fed, strict=True)
            for n in range(len(tokens))
        ]
        step = self._store.begin(runs, mass=[answer.wants_mass for answer in running])
        transformer = self._transformer
        x = transformer.forward(transformer.embed(rows), positions, step.attend)
        step.finish()
        held = step.resident_bytes.tolist()
        choosing, dropped = [], []
        for number, answer in enumerate(running):
            mine = step.rows_of(number)
            mass = step.mass(number) if answer.wants_mass else None
            dropped.append(answer.took(held[mine], mass))
            # An answer without a mask has ended.
            if answer.mask is not None and not answer.to_feed:
                choosing.append((answer, mine.stop - 1))
        seats, who = [answer.seat for answer in running], [answer.who for answer in running]
        evict(self._store, seats, dropped, who)
        if choosing:
            logits = transformer.logits(x[[row for _, row in choosing]])
            self.choose([answer for answer, _ in choosing], logits)

    def choose(self, answers: Sequence[Answer], logits: torch.Tensor) -> None:
        """Take the best legal token of each row, and whatever the grammar forces after it."""
        if not answers:
            return
        masks = [answer.mask for answer in answers if answer.mask is not None]
        who = [answer.who for answer in answers]
        for answer, token in zip(answers, best(masks, logits, who), strict=True):
            answer.accept(token)
        settle(answers, self._transformer.layout.vocab_size)
