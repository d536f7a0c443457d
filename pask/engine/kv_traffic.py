"""What attention reads of a sequence at each decode step, in bytes: traffic, and no storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pask.engine.kv_seat import Seat

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings


def bytes_read(store: Holdings, seat: Seat, resident: Sequence[int]) -> list[int]:
    """Bytes that the last rows fed to a seat read, one number a row, oldest first.

    `resident`: bytes that the seat held after each of these rows, its own token included. Without a
    `SlotChoice` attention goes over all of that and these are the numbers, pages included. With one
    a row reads in each layer and kv head, s of its tokens being stored there,

        min(count, s) tokens' keys and values + ceil(s / chunk) * channels numbers of the summaries:

    `kernels.choose_slots` looks at every chunk, but only at the query's `channels` largest channels
    and of each at one of its two bounds. Whole slots count then, not pages, and not what widening
    the newest chunk's bounds takes. An answer's first token, chosen by the exact prefill, counts as
    a row over what is stored of the prompt.
    """
    choice = seat.choice
    if choice is None:
        return [int(held) for held in resident]
    # Every token of such a seat ends at HIGH in every layer, and none is evicted.
    later = np.arange(len(resident))[::-1, None]
    stored = store.counts["high"][seat.id] - later  # [rows, layers], the same in all kv heads
    slot_bytes = store.pool("high").slot_bytes
    number_bytes = slot_bytes // (2 * store.shape.head_dim)
    tokens = np.minimum(choice.count, stored) * slot_bytes
    scanned = -(-stored // choice.chunk) * choice.channels * number_bytes
    total: list[int] = ((tokens + scanned).sum(axis=1) * store.shape.kv_heads).tolist()
    return total
