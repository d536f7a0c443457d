"""Replays under way: what waits its turn, and answers that are being written on."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pask.engine.answer import Answer
from pask.engine.replay_job import Asked, Job


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


@dataclass(eq=False)
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

    def ask(self, vocabulary: Sequence[bytes]) -> None:
        """Give the answer up if it may be; one that has ended is not asked about."""
        tokens, give_up = self.answer.tokens, self.job.give_up
        if give_up is None or self.answer.finish or self.seen == len(tokens):
            return
        self.text += self.decoder.decode(b"".join(vocabulary[t] for t in tokens[self.seen :]))
        self.seen = len(tokens)
        if give_up(self.text):
            self.given_up, self.answer.finish = True, "length"


class Waiting:
    """What is asked for, in order, of which the first can be looked at before it is taken.

    A None among it says that there is nothing more for now.
    """

    def __init__(self, asked: Iterable[Asked | None]) -> None:
        self._asked = iter(asked)
        self._first: Asked | None = None
        self.ended = False

    def first(self) -> Asked | None:
        """None where there is nothing: for now, or for good where it has `ended`."""
        if self._first is None and not self.ended:
            try:
                self._first = next(self._asked)
            except StopIteration:
                self.ended = True
        return self._first

    def take(self) -> None:
        self._first = None
