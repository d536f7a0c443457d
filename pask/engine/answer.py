"""One answer while it is written: its grammar, its tokens, and what is left to feed.

Choosing and feeding are apart. A token is accepted when it is chosen, or when the grammar leaves no
choice; what was accepted but not fed yet is fed together, with the answer that feeding one by one
would give. An answer that has ended is fed to its end, so that its bytes are those of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import xgrammar as xgr

from pask.engine.ask import evicted, levels_of, tell
from pask.engine.constraint import LegalTokens
from pask.engine.generation import ByteCounts, Generation, Limits
from pask.engine.kv_evict import EvictionRefused
from pask.engine.kv_plan import Run
from pask.engine.kv_seat import Seat
from pask.engine.kv_store import KVStore
from pask.engine.kv_traffic import bytes_read
from pask.engine.prefill import Prepared
from pask.errors import HarnessFault
from pask.methods.contract import Decoded
from pask.methods.levels import Level
from pask.structure.tags import Tag
from pask.structure.tracker import Tracker


class Answer:
    """A request's answer under one entry, from its first choice to its result."""

    def __init__(
        self,
        prepared: Prepared,
        number: int,
        seat: Seat,
        store: KVStore,
        vocabulary: Sequence[bytes],
        limits: Limits,
        prompt_bytes: int,
    ) -> None:
        """The task's entry `number`; its prompt took `prompt_bytes` of what `seat` holds."""
        request = prepared.task.request
        self.who = prepared.who[number]
        self.seat = seat
        self.tokens: list[int] = []
        self.finish: Literal["stop", "length"] | None = None
        self.mask: torch.Tensor | None = None  # of the next choice, where it is open
        self.matcher = xgr.GrammarMatcher(request.grammar)
        self._request_id, self._entry = request.id, prepared.task.methods[number][0]
        self._state, self._info = prepared.states[number], prepared.info
        self._store, self._vocabulary, self._limits = store, vocabulary, limits
        self._tracker = Tracker(request.tag_grammar) if request.tag_grammar else None
        self._tags: list[Tag] = []
        self._levels: list[tuple[Level, ...]] = []  # of all tokens, where the state acts on them
        self._fed = 0
        # The first token is chosen over the prompt's KV alone.
        self._resident_sum = prompt_bytes
        (self._read_sum,) = bytes_read(store, seat, [prompt_bytes])
        self._full_sum = self._full(0)

    @property
    def wants_mass(self) -> bool:
        return self._state.wants.step_mass

    @property
    def to_feed(self) -> int:
        """Accepted tokens whose KV does not exist yet and will have to."""
        # Nothing is chosen after the token that reaches the limit, so it is never fed.
        return len(self.tokens) - self._fed - (self.finish == "length")

    @property
    def fed(self) -> int:
        """Tokens whose KV the store holds."""
        return self._fed

    @property
    def done(self) -> bool:
        return self.finish is not None and not self.to_feed

    def accept(self, token: int) -> None:
        """Take the next token, chosen or forced."""
        if not self.matcher.accept_token(token):
            raise HarnessFault(
                f"the grammar refused token {token}, which it had called legal", where=self.who
            )
        self.mask = None
        if self.matcher.is_terminated():
            self.finish = "stop"
            return
        self.tokens.append(token)
        text = self._vocabulary[token]
        tag = None
        if self._tracker is not None:
            tag = self._tag(self._tracker, text)
            self._tags.append(tag)
        if self._state.evicts:
            tell(self._state, Decoded(len(self.tokens) - 1, token, text, tag), self.who)
        if self._state.acts_on_tokens:
            decoded = Decoded(len(self.tokens) - 1, token, text, tag)
            self._levels.append(levels_of(self._state, decoded, self._info.layers, self.who))
        if len(self.tokens) == self._limits.max_new_tokens:
            self.finish = "length"

    def next_run(self, longest: int) -> tuple[list[int], Run]:
        """The tokens to feed now, 1 to `longest`, and what the store has to know of them."""
        rows = min(self.to_feed, self.seat.longest_run, longest)
        if self._state.evicts:
            rows = 1
        fed = slice(self._fed, self._fed + rows)
        levels = np.array(self._levels[fed], dtype=np.int8) if self._levels else None
        return self.tokens[fed], Run(self.seat, levels, rows)

    def took(self, resident_bytes: Sequence[int], mass: torch.Tensor | None) -> torch.Tensor | None:
        """A run was fed; `resident_bytes` after each row, `mass` where the state wants it.

        Answers the tokens that its method drops now, for `evict`.
        """
        self._read_sum += sum(bytes_read(self._store, self.seat, resident_bytes))
        for held in resident_bytes:
            self._fed += 1
            self._resident_sum += int(held)
            self._full_sum += self._full(self._fed)
        if not self._state.evicts:
            return None
        count = self._info.prompt_tokens + self._fed
        return evicted(self._state, count, mass, self._info, self.who)

    def result(self) -> Generation:
        assert self.finish is not None
        stages = self._store.resident_bytes(self.seat)
        # The grammar's own bytes; a character can be cut short by the token limit, and xgrammar
        # lets surrogates through.
        text = b"".join(self._vocabulary[token] for token in self.tokens).decode(errors="replace")
        return Generation(
            request_id=self._request_id,
            entry=self._entry,
            token_ids=tuple(self.tokens),
            text=text,
            finish=self.finish,
            prompt_tokens=self._info.prompt_tokens,
            bytes=ByteCounts(
                prompt=sum(stages["prompt"].values()),
                decode=sum(stages["decode"].values()),
                full=self._full(self._fed),
                full_prompt=self._store.full_prompt_bytes(self._info.prompt_tokens),
                resident_sum=self._resident_sum,
                read_sum=self._read_sum,
                full_sum=self._full_sum,
            ),
            notes=self._state.notes,
            tags=tuple(self._tags),
        )

    def _full(self, decoded: int) -> int:
        return self._store.full_bytes(self._info.prompt_tokens, decoded)

    def _tag(self, tracker: Tracker, token: bytes) -> Tag:
        try:
            return tracker.accept(token)
        except ValueError as error:
            raise HarnessFault(
                f"the tag grammar refused {token!r}, which the grammar had accepted",
                where=self.who,
                why=str(error),
            ) from error


def evict(
    store: KVStore,
    seats: Sequence[Seat],
    dropped: Sequence[torch.Tensor | None],
    who: Sequence[str],
) -> None:
    """Drop what the methods of several requests named, if anything; HarnessFault where one named
    what is not resident."""
    some = [n for n, tokens in enumerate(dropped) if tokens is not None]
    if not some:
        return
    try:
        store.evict_together(
            [seats[n] for n in some], [tokens for tokens in dropped if tokens is not None]
        )
    except EvictionRefused as error:
        raise HarnessFault(
            "the method evicts a token that is not resident",
            where=who[some[error.number]],
            why=str(error),
            todo="mend the method; baselines/README.md has the contract",
        ) from error


def settle(answers: Sequence[Answer], vocab_size: int) -> None:
    """Accept tokens for as long as the grammar leaves no choice, in all answers together.

    Afterwards each is finished or has the mask of its next choice. HarnessFault where no token is
    legal.
    """
    waiting = [answer for answer in answers if answer.finish is None]
    while waiting:
        legal = LegalTokens([answer.matcher for answer in waiting], vocab_size)
        forced = []
        for row, (answer, count) in enumerate(zip(waiting, legal.counts, strict=True)):
            if count == 0:
                raise HarnessFault("no token is legal", where=answer.who)
            if count > 1:
                answer.mask = legal.mask(row)
                continue
            answer.accept(legal.only(row))
            if answer.finish is None:
                forced.append(answer)
        waiting = forced
