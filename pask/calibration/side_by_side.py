"""Rows whose answers are judged under many methods, some rows side by side.

An answer that a method changed is written on, and a step of a few answers reads the same weights as
one of many. One row seldom has many that go on at a time, so those of several are written together.
What comes out is what each row alone would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pask.calibration.reference import Reference, ReferenceRow
from pask.engine.replay import Replayed, Replayer
from pask.engine.replay_job import Asked, Named
from pask.engine.trace import Trace

AT_ONCE = 4
"""Rows that are begun and not finished; a kill loses what was found out about them."""

SEATS = AT_ONCE + 1
"""Of the store, beside those of the batch: each row's prompt, and the fork that reads an answer."""


@dataclass
class Begun:
    """A row whose answer was read, and what is judged on it.

    `trace`: the reference's, or a beginning of it. `replayed`: what has come out, by method's name.
    """

    row: ReferenceRow
    reference: Reference
    trace: Trace
    methods: Sequence[Named]
    replayed: dict[str, Replayed] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return len(self.replayed) == len(self.methods)


def judged(
    replayer: Replayer,
    rows: Iterable[ReferenceRow],
    begin: Callable[[ReferenceRow], Begun],
    *,
    max_batch: int,
) -> Iterator[Begun]:
    """Each row with all of its outcomes, the first to be finished first.

    `begin` reads a row's answer with this `replayer`. Its trace is freed here, when the next row is
    asked for. Errors as of `begin` and `Replayer.replay_all`.
    """
    under_way: dict[str, Begun] = {}
    finished: list[Begun] = []

    def fits(row: ReferenceRow) -> bool:
        others = [begun.row.task for begun in under_way.values()]
        return len(others) < AT_ONCE and replayer.room_beside(row.task, others)

    def asked() -> Iterator[Asked | None]:
        for row in rows:
            while under_way and not fits(row):
                yield None
            begun = begin(row)
            if begun.finished:  # there is nothing to be judged on it
                finished.append(begun)
                continue
            under_way[row.task.request.id] = begun
            for named in begun.methods:
                yield Asked(begun.trace, named, row.hopeless)

    def handed_out() -> Iterator[Begun]:
        while finished:
            yield finished[0]
            replayer.free(finished.pop(0).reference.trace)

    for found in replayer.replay_all(asked(), max_batch=max_batch):
        begun = under_way[found.generation.request_id]
        begun.replayed[found.generation.entry] = found
        if begun.finished:
            finished.append(under_way.pop(begun.row.task.request.id))
        yield from handed_out()
    yield from handed_out()
