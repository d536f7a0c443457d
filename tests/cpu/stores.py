"""A prompt in a KV store, and one decode step, as the engine's tests drive them by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pask.engine.decode import new_store
from pask.engine.kv_plan import Run
from pask.engine.kv_seat import Seat
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel


def small_store(model: LoadedModel, dtype: torch.dtype = torch.float16) -> KVStore:
    return new_store(model, seats=160, capacity_tokens=8192, kv_dtype=dtype)


def prefilled(model: LoadedModel, store: KVStore, ids: Sequence[int]) -> Seat:
    seat = store.open(len(ids))
    model.transformer.prefill(
        ids, lambda layer, q, k, v: store.add_prompt([seat], layer, k, v, None)
    )
    return seat


@torch.inference_mode()
def fed(
    model: LoadedModel, store: KVStore, seats: Sequence[Seat], tokens: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Feed each seat a run of tokens in one step; logits [all rows, vocab]."""
    positions = [
        seat.position + n for seat, run in zip(seats, tokens, strict=True) for n in range(len(run))
    ]
    step = store.begin([Run(s, None, len(run)) for s, run in zip(seats, tokens, strict=True)])
    rows = model.transformer.embed([token for run in tokens for token in run])
    x = model.transformer.forward(rows, positions, step.attend)
    step.finish()
    return model.transformer.logits(x)
