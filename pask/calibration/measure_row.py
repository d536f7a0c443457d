"""All that a policy is made from, measured on calibration rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pask.calibration.distortion import distortions
from pask.calibration.intervention import Buckets, Interventions
from pask.calibration.reference import Reference, ReferenceRow, read_reference, replayed_part
from pask.calibration.sensitivity import Plan
from pask.calibration.side_by_side import Begun, judged
from pask.engine.generation import Limits
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel
from pask.engine.replay import Replayer
from pask.policy.actions import short


class RowMeasurer:
    """Measures rows over one model and store; nothing of a row stays in the store.

    The store has `pask.calibration.side_by_side.SEATS` seats beside those of a batch. After an
    error it is of no use any more.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: KVStore,
        limits: Limits,
        buckets: Buckets,
        interventions: Interventions,
        *,
        max_batch: int = 32,
    ) -> None:
        self._model, self._store = model, store
        self._replayer = Replayer(model, store, limits)
        self._plan = Plan(model.layout.layers, buckets, interventions)
        self._max_batch = max_batch

    def measure(
        self, rows: Iterable[ReferenceRow]
    ) -> Iterator[tuple[ReferenceRow, dict[str, Any]]]:
        """What each row tells, as JSON; the first to be finished first.

        prompt_tokens and fed: counts, replayed: of the fed ones those that interventions were
        replayed on; reference_correct: the verdict on the answer; names and
        labels: see `Reference`; outcomes: `Outcome`'s records; distortions:
        `pask.calibration.distortion.Distorted`'s. Errors as of `read_reference`,
        `Replayer.replay_all` and the rows' verdicts.
        """
        for begun in judged(self._replayer, rows, self._begin, max_batch=self._max_batch):
            row, reference, fed = begun.row, begun.reference, begun.trace.fed
            found = self._plan.outcomes(reference, fed, begun.replayed, row.judge)
            yield (
                row,
                {
                    "prompt_tokens": len(row.task.request.prompt_ids),
                    "fed": reference.trace.fed,
                    "replayed": fed,
                    "reference_correct": reference.correct,
                    "names": list(reference.names),
                    "labels": dict(reference.labels),
                    "outcomes": [outcome.record() for outcome in found],
                    "distortions": self._distortions(reference),
                },
            )

    def _begin(self, row: ReferenceRow) -> Begun:
        plan = self._plan
        reference = read_reference(
            self._replayer,
            row.task,
            row.tokens,
            row.judge,
            buckets=plan.buckets,
            sinks=plan.interventions.sinks,
        )
        trace = replayed_part(reference, row.hopeless)
        return Begun(row, reference, trace, plan.methods(reference, trace.fed))

    def _distortions(self, reference: Reference) -> list[dict[str, Any]]:
        buckets, interventions = self._plan.buckets, self._plan.interventions
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # these sums would depend on how many there are
        try:
            found = distortions(
                self._model,
                self._store,
                reference.trace,
                groups=buckets.layer_groups,
                coarsening=buckets.coarsening,
                recent=interventions.recent,
                ladder=interventions.levels,
                sinks=interventions.sinks,
            )
        finally:
            torch.set_num_threads(threads)
        return [
            {
                "side": one.side,
                "bucket": one.bucket.name,
                "group": one.bucket.group,
                "level": short(one.level),
                "tokens": one.tokens,
                "positions": one.positions,
                "total": one.total,
            }
            for one in found
        ]
