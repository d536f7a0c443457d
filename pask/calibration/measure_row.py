"""All that a policy is made from, measured on one calibration row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pask.calibration.distortion import distortions
from pask.calibration.sensitivity import (
    Buckets,
    Interventions,
    Judge,
    Reference,
    outcomes,
    read_reference,
    replayed_part,
)
from pask.engine.generation import Limits, Task
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel
from pask.engine.replay import Replayer
from pask.engine.replay_open import GiveUp
from pask.policy.actions import short


class RowMeasurer:
    """Measures rows over one model and store, one at a time; nothing of a row stays in the store.

    After an error the store is of no use any more.
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
        self._buckets, self._interventions = buckets, interventions
        self._max_batch = max_batch

    def measure(
        self, task: Task, tokens: Sequence[int], judge: Judge, hopeless: GiveUp | None = None
    ) -> dict[str, Any]:
        """What a task's row tells, as JSON; `tokens` are a Full-KV answer to it.

        prompt_tokens and fed: counts, replayed: of the fed ones those that interventions were
        replayed on; reference_correct: the verdict on the answer; names and
        labels: see `Reference`; outcomes: `Outcome`'s records; distortions:
        `pask.calibration.distortion.Distorted`'s. `hopeless` and errors as of `read_reference` and
        `outcomes`.
        """
        reference = read_reference(
            self._replayer,
            task,
            tokens,
            judge,
            buckets=self._buckets,
            sinks=self._interventions.sinks,
        )
        found = outcomes(
            self._replayer,
            reference,
            judge,
            layers=self._model.layout.layers,
            buckets=self._buckets,
            interventions=self._interventions,
            max_batch=self._max_batch,
            hopeless=hopeless,
        )
        line = {
            "prompt_tokens": len(task.request.prompt_ids),
            "fed": reference.trace.fed,
            "replayed": replayed_part(reference, hopeless).fed,
            "reference_correct": reference.correct,
            "names": list(reference.names),
            "labels": dict(reference.labels),
            "outcomes": [outcome.record() for outcome in found],
            "distortions": self._distortions(reference),
        }
        self._replayer.free(reference.trace)
        return line

    def _distortions(self, reference: Reference) -> list[dict[str, Any]]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # these sums would depend on how many there are
        try:
            found = distortions(
                self._model,
                self._store,
                reference.trace,
                groups=self._buckets.layer_groups,
                coarsening=self._buckets.coarsening,
                recent=self._interventions.recent,
                ladder=self._interventions.levels,
                sinks=self._interventions.sinks,
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
