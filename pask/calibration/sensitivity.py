"""Task-error sensitivity: does an answer stay right when one bucket is kept at a lower level?

Equation 5 asks for complete generation under each intervention, here of one calibration row. It
starts from the row's answer under Full KV and replays every intervention on it
(`pask.engine.replay`), which gives what complete generation would give; the official checker's
verdict on it is asked where the answer changed. Sums over rows are `pask.calibration.gather`'s.

The replay also shows D(q, a) of Equation 4 as it is felt through the group's layers, each of which
gets what the lower ones made of the intervention (`Outcome.propagated`).

Only the verdict counts, so nothing is computed that comes after it (`pask.bfcl.early_verdict`): an
answer that cannot be right any more is not written on, and where that is so of the reference's own
beginning, no more than that beginning is replayed.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from pask.calibration.distortion import affected
from pask.calibration.intervention import SINKS, OneBucket, OneLabel, changeable
from pask.engine.generation import Generation, Task
from pask.engine.replay import Replayed, Replayer
from pask.engine.replay_open import GiveUp
from pask.engine.trace import Trace
from pask.methods.contract import Method
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.policy.actions import Ladder, short
from pask.policy.evidence import SIDES
from pask.structure.buckets import LayerBucket, bucket_name, layer_groups

DECODE, PROMPT = SIDES

Judge = Callable[[Generation], bool]
"""Whether an answer is right."""


@dataclass(frozen=True)
class Buckets:
    """What a bucket is: layer groups, and names of coarsened tags (`pask.structure.buckets`)."""

    layer_groups: int | tuple[int, ...]
    coarsening: str


@dataclass(frozen=True)
class Interventions:
    """Which changes are tried on each bucket: every level of `ladder` below HIGH.

    `recent` latest decoded tokens beside the newest, the first `sinks` prompt tokens and the last
    one stay at HIGH in all of them.
    """

    recent: int
    ladder: Ladder
    sinks: int = SINKS

    @property
    def levels(self) -> tuple[Level, ...]:
        """Those below HIGH, ascending."""
        return tuple(level for level in self.ladder.actions if level is not Level.HIGH)


@dataclass(frozen=True)
class Reference:
    """A row's answer under Full KV: the trace that interventions are replayed on, and its verdict.

    `names`: the bucket name of each fed token, in order; `labels`: the prompt's tokens by label
    value, of those that may be changed.
    """

    trace: Trace
    correct: bool
    names: tuple[str, ...]
    labels: Mapping[str, int]


@dataclass(frozen=True)
class Outcome:
    """What one intervention did to one answer.

    `tokens`: the bucket's, of the answer's fed ones or of the prompt's that may be changed.
    `changed`: another answer came out; `correct` is the verdict on it, the reference's where it did
    not. `given_up`: it was not followed to its end, since it could not be right any more; if it is
    not changed, it was the reference's until then. `fed`: tokens of the answer, so far, that have
    keys and values. `token_layers` were forwarded for it. `propagated`: the squared change of
    attention's output by the intervention, of the worst query head, summed over the group's layers
    and the reference's positions as far as they were replayed, of which `positions` read a changed
    token.
    """

    side: str
    bucket: LayerBucket
    level: Level
    tokens: int
    changed: bool
    correct: bool
    given_up: bool
    fed: int
    token_layers: int
    propagated: float
    positions: int

    def record(self) -> dict[str, Any]:
        """As JSON; the level by its short name."""
        return {
            "side": self.side,
            "bucket": self.bucket.name,
            "group": self.bucket.group,
            "level": short(self.level),
            "tokens": self.tokens,
            "changed": self.changed,
            "correct": self.correct,
            "given_up": self.given_up,
            "fed": self.fed,
            "token_layers": self.token_layers,
            "propagated": self.propagated,
            "positions": self.positions,
        }


def read_reference(
    replayer: Replayer,
    task: Task,
    tokens: Sequence[int],
    judge: Judge,
    *,
    buckets: Buckets,
    sinks: int,
) -> Reference:
    """Read a task's request and `tokens`, a Full-KV answer to it; errors as `Replayer.trace`.

    The answer may be another engine's and differ from ours where two tokens are nearly as good.
    Then ours takes its place: both terms of Equation 5 come from one engine. The trace is the
    caller's to free.
    """
    trace = replayer.trace(task, tokens)
    (own,) = replayer.replay(trace, [("full", FullKV())])
    if own.first_difference is not None:
        replayer.free(trace)
        trace = replayer.trace(task, own.generation.token_ids)
    names = []
    for decoded in trace.decoded[: trace.fed]:
        if decoded.tag is None:
            raise ValueError(f"{task.request.id}: buckets are made of tags, its answer has none")
        names.append(bucket_name(decoded.tag, buckets.coarsening))
    if task.request.prompt_labels is None:
        raise ValueError(f"{task.request.id}: buckets are made of labels, its prompt has none")
    prompt = task.request.prompt_labels
    labels = Counter(prompt[n].value for n in changeable(prompt, sinks))
    return Reference(trace, judge(own.generation), tuple(names), labels)


def outcomes(
    replayer: Replayer,
    reference: Reference,
    judge: Judge,
    *,
    layers: int,
    buckets: Buckets,
    interventions: Interventions,
    max_batch: int = 32,
    hopeless: GiveUp | None = None,
) -> tuple[Outcome, ...]:
    """Every intervention on the buckets that occur in a row, both sides, at each level below HIGH.

    A bucket that does not occur changes nothing, is not in the result and costs nothing. Nor does
    one whose decoded tokens are all within the window still when the last choice is made; it is in
    the result, unchanged. (What decoding computes of such a one differs from the reference by the
    order of its sums alone.) `layers`: of the model. `hopeless`: whether no right answer begins
    with a text; then an answer that does is wrong, without being written on or judged.
    Errors as `Replayer.replay` and `judge` raise them.
    """
    trace = replayed_part(reference, hopeless)
    of_group = layer_groups(layers, buckets.layer_groups)
    planned = list(_planned(reference, trace.fed, layers, buckets, interventions))
    waiting = [(str(n), one.method) for n, one in enumerate(planned) if one.method is not None]
    replayed: dict[int, Replayed] = {}
    for one in replayer.replay(trace, waiting, max_batch=max_batch, give_up=hopeless):
        replayed[int(one.generation.entry)] = one
    verdicts: dict[tuple[str, str], bool] = {}
    found = []
    for n, plan in enumerate(planned):
        outcome = replayed.get(n)
        changed = outcome is not None and outcome.first_difference is not None
        correct, given_up = reference.correct, outcome is not None and outcome.given_up
        if given_up:
            correct = False
        elif outcome is not None and changed:
            answer = outcome.generation
            read = answer.finish, answer.text  # all that a verdict depends on
            if read not in verdicts:
                verdicts[read] = judge(answer)
            correct = verdicts[read]
        fed, cost, propagated = reference.trace.fed, 0, 0.0
        if outcome is not None:
            written = outcome.generation
            fed, cost = written.new_tokens - (written.finish == "length"), outcome.token_layers
            propagated = fsum(outcome.changes[layer] for layer in of_group[plan.bucket.group])
        first = reference.names.index(plan.bucket.name) if plan.side == DECODE else 0
        found.append(
            Outcome(
                side=plan.side,
                bucket=plan.bucket,
                level=plan.level,
                tokens=plan.tokens,
                changed=changed,
                correct=correct,
                given_up=given_up,
                fed=fed,
                token_layers=cost,
                propagated=propagated,
                positions=affected(plan.side, first, trace.fed, interventions.recent),
            )
        )
    return tuple(found)


def replayed_part(reference: Reference, hopeless: GiveUp | None) -> Trace:
    """What interventions are replayed on: the reference's trace up to the token with which its
    answer becomes hopeless, or all of it."""
    trace = reference.trace
    if hopeless is None or reference.correct:
        return trace
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = ""
    for tokens, decoded in enumerate(trace.decoded, start=1):
        text += decoder.decode(decoded.text)
        if hopeless(text):
            return _beginning(trace, tokens)
    return trace


def _beginning(trace: Trace, tokens: int) -> Trace:
    """The trace's first tokens, at least one, as if the answer had been cut off there."""
    fed = tokens - 1
    return replace(
        trace,
        tokens=trace.tokens[:tokens],
        ended=False,
        decoded=trace.decoded[:tokens],
        inputs=tuple(rows[:fed] for rows in trace.inputs),
        keys=tuple(rows[:fed] for rows in trace.keys),
        values=tuple(rows[:fed] for rows in trace.values),
        outputs=tuple(rows[:fed] for rows in trace.outputs),
        masks=trace.masks[:tokens],
        chosen=trace.chosen[:tokens],
    )


@dataclass(frozen=True)
class _Planned:
    side: str
    bucket: LayerBucket
    level: Level
    tokens: int
    method: Method | None  # None: it cannot change anything


def _planned(
    reference: Reference, fed: int, layers: int, buckets: Buckets, interventions: Interventions
) -> Iterator[_Planned]:
    """Group by group: replays that begin at one layer are computed together. `fed`: tokens of the
    answer after which no choice is looked at."""
    counts = Counter(reference.names)  # in the order of their first occurrence
    # The row of fed token u reads those at their final level that come `recent + 1` or more before.
    felt = frozenset(reference.names[: max(fed - 1 - interventions.recent, 0)])
    for group in range(len(layer_groups(layers, buckets.layer_groups))):
        for name, tokens in counts.items():
            bucket = LayerBucket(name, group)
            for level in interventions.levels:
                changed = OneBucket(
                    bucket=bucket,
                    level=level,
                    recent=interventions.recent,
                    groups=buckets.layer_groups,
                    coarsening=buckets.coarsening,
                )
                method = changed if name in felt else None
                yield _Planned(DECODE, bucket, level, tokens, method)
        for label, tokens in reference.labels.items():
            bucket = LayerBucket(label, group)
            for level in interventions.levels:
                lowered = OneLabel(
                    bucket=bucket,
                    level=level,
                    sinks=interventions.sinks,
                    groups=buckets.layer_groups,
                )
                yield _Planned(PROMPT, bucket, level, tokens, lowered)
