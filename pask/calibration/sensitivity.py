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

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

from pask.calibration.distortion import affected
from pask.calibration.intervention import Buckets, Interventions, OneBucket, OneLabel
from pask.calibration.reference import Judge, Reference
from pask.engine.replay import Replayed
from pask.engine.replay_job import Named
from pask.methods.contract import Method
from pask.methods.levels import Level
from pask.policy.actions import short
from pask.policy.evidence import SIDES
from pask.structure.buckets import LayerBucket, layer_groups

DECODE, PROMPT = SIDES


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


@dataclass(frozen=True)
class Plan:
    """Every intervention on the buckets that occur in a row, both sides, at each level below HIGH.

    `layers`: of the model. A bucket that does not occur changes nothing, has no outcome and costs
    nothing. Nor does one whose decoded tokens are all within the window still when the last choice
    is made; its outcome is an unchanged answer, and no method is to be judged. (What decoding
    computes of such a one differs from the reference by the order of its sums alone.)
    """

    layers: int
    buckets: Buckets
    interventions: Interventions

    def methods(self, reference: Reference, fed: int) -> list[Named]:
        """What is to be replayed on the row's first `fed` tokens, all that are looked at."""
        planned = enumerate(self._planned(reference, fed))
        return [(str(n), one.method) for n, one in planned if one.method is not None]

    def outcomes(
        self, reference: Reference, fed: int, replayed: Mapping[str, Replayed], judge: Judge
    ) -> tuple[Outcome, ...]:
        """What came out, from the replays of all `methods` by name; errors as `judge` raises them.

        `judge` is asked where the answer changed, once for each text. An answer that was given up
        is wrong.
        """
        verdicts: dict[tuple[str, str], bool] = {}

        def verdict(outcome: Replayed | None) -> bool:
            if outcome is not None and outcome.given_up:
                return False
            if outcome is None or outcome.first_difference is None:
                return reference.correct
            answer = outcome.generation
            read = answer.finish, answer.text  # all that a verdict depends on
            if read not in verdicts:
                verdicts[read] = judge(answer)
            return verdicts[read]

        return tuple(
            self._outcome(reference, fed, one, replayed.get(str(n)), verdict)
            for n, one in enumerate(self._planned(reference, fed))
        )

    def _outcome(
        self,
        reference: Reference,
        fed: int,
        plan: _Planned,
        outcome: Replayed | None,
        verdict: Callable[[Replayed | None], bool],
    ) -> Outcome:
        group = layer_groups(self.layers, self.buckets.layer_groups)[plan.bucket.group]
        first = reference.names.index(plan.bucket.name) if plan.side == DECODE else 0
        written, cost, propagated = reference.trace.fed, 0, 0.0
        if outcome is not None:
            answer = outcome.generation
            written, cost = answer.new_tokens - (answer.finish == "length"), outcome.token_layers
            propagated = fsum(outcome.changes[layer] for layer in group)
        return Outcome(
            side=plan.side,
            bucket=plan.bucket,
            level=plan.level,
            tokens=plan.tokens,
            changed=outcome is not None and outcome.first_difference is not None,
            correct=verdict(outcome),
            given_up=outcome is not None and outcome.given_up,
            fed=written,
            token_layers=cost,
            propagated=propagated,
            positions=affected(plan.side, first, fed, self.interventions.recent),
        )

    def _planned(self, reference: Reference, fed: int) -> Iterator[_Planned]:
        """Group by group: replays that begin at one layer are computed together."""
        tried, groups = self.interventions, self.buckets.layer_groups
        counts = Counter(reference.names)  # in the order of their first occurrence
        # The row of fed token u reads those at their final level that come `recent + 1` or more
        # before.
        felt = frozenset(reference.names[: max(fed - 1 - tried.recent, 0)])
        for group in range(len(layer_groups(self.layers, groups))):
            for name, tokens in counts.items():
                bucket = LayerBucket(name, group)
                for level in tried.levels:
                    changed = OneBucket(
                        bucket=bucket,
                        level=level,
                        recent=tried.recent,
                        groups=groups,
                        coarsening=self.buckets.coarsening,
                    )
                    method = changed if name in felt else None
                    yield _Planned(DECODE, bucket, level, tokens, method)
            for label, tokens in reference.labels.items():
                bucket = LayerBucket(label, group)
                for level in tried.levels:
                    lowered = OneLabel(bucket=bucket, level=level, sinks=tried.sinks, groups=groups)
                    yield _Planned(PROMPT, bucket, level, tokens, lowered)


@dataclass(frozen=True)
class _Planned:
    side: str
    bucket: LayerBucket
    level: Level
    tokens: int
    method: Method | None  # None: it cannot change anything
