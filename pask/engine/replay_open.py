"""Replays under way: what waits its turn, and answers that are being written on."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pask.engine.answer import Answer
from pask.engine.replay_job import Job, Named

GiveUp = Callable[[str], bool]
"""Whether an answer that begins with this text (whole characters) need not be written on."""


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


@dataclass
class Open:
    """A replay whose answer is being written on, or is whole, or is given up."""

    answer: Answer
    job: Job
    first_difference: int | None
    replayed: int  # tokens fed by the pass
    given_up: bool = False
    text: str = ""  # of the first `seen` tokens, without a character that is not whole
    seen: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=_decoder)

    @property
    def ended(self) -> bool:
        return self.given_up or self.answer.done

    def ask(self, give_up: GiveUp, vocabulary: Sequence[bytes]) -> None:
        """Give the answer up if it may be; one that has ended is not asked about."""
        tokens = self.answer.tokens
        if self.answer.finish or self.seen == len(tokens):
            return
        self.text += self.decoder.decode(b"".join(vocabulary[t] for t in tokens[self.seen :]))
        self.seen = len(tokens)
        if give_up(self.text):
            self.given_up, self.answer.finish = True, "length"


class Waiting:
    """Methods in order, of which the first can be looked at before it is taken."""

    def __init__(self, methods: Iterable[Named]) -> None:
        self._methods = iter(methods)
        self._first = next(self._methods, None)

    def first(self) -> Named | None:
        return self._first

    def take(self) -> None:
        self._first = next(self._methods, None)
