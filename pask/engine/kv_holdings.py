"""What the sequences of a store hold of its pages, and what is left: the store's inner state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pask.engine.kv_bytes import Stages, count_bytes
from pask.engine.kv_seat import (
    CHANNEL2,
    FILLED_KINDS,
    KIND_POOL,
    KVShape,
    Pool,
    Seat,
    low_kind,
    pool_slots,
)
from pask.engine.kv_statistics import KeyStatistics
from pask.engine.kv_tables import SeatPages
from pask.engine.kv_trails import Trails
from pask.engine.pages import PagePool
from pask.methods.levels import Level


class Holdings:
    """Pools, page tables and token counts by seat; `KVStore` adds what changes them.

    `counts[kind]` [seats, layers]: slots in use of the regions that are filled from slot 0 on, the
    same in all kv heads of a layer. `prompt_low[kind]`: those of them that hold prompt tokens;
    `prompt_high`: the same at HIGH, of all kv heads together, which may lose different ones.
    `rings` [seats]: slots of the rings, `ring_written` [seats, layers]: how many were ever written,
    before wrapping. `allowed` [seats, level]: where decoded tokens may end. `seats`: who has which.
    """

    def __init__(
        self,
        shape: KVShape,
        pages: Mapping[Pool, int],
        *,
        seats: int,
        max_tokens: int,
        page_slots: int = 16,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
    ) -> None:
        if Level.HIGH not in pages:
            raise ValueError("a store needs HIGH pages")
        self.shape = shape
        self.page_slots = page_slots
        self.max_tokens = max_tokens
        self.dtype = dtype
        self.device = torch.device(device)
        pools = {
            name: PagePool(
                name if isinstance(name, Level) else Level.LOW2,
                count,
                page_slots=pool_slots(name, page_slots),
                head_dim=shape.head_dim,
                dtype=dtype,
                device=device,
                channel_keys=name == CHANNEL2,
            )
            for name, count in pages.items()
        }
        levels = [name for name in pools if isinstance(name, Level)]
        self.seat_pages = SeatPages(shape, pools, seats, max_tokens, device)
        self.statistics = KeyStatistics(shape, seats, device)
        self.trails = Trails(seats, shape.layers, levels)
        self.rings = np.ones(seats, dtype=np.int32)
        self.ring_written = np.zeros((seats, shape.layers), dtype=np.int64)
        self.allowed = np.zeros((seats, Level.HIGH + 1), dtype=bool)
        self.prompt_high = np.zeros((seats, shape.layers), dtype=np.int64)
        self.seats: list[Seat | None] = [None] * seats
        self.counts = {
            kind: np.zeros((seats, shape.layers), dtype=np.int64)
            for kind in FILLED_KINDS
            if KIND_POOL[kind] in pools
        }
        self.prompt_low = {
            kind: np.zeros_like(counts) for kind, counts in self.counts.items() if kind != "high"
        }

    @property
    def _by_layer(self) -> list[np.ndarray]:
        """All counts that belong to a seat, [seats, layers] each."""
        low = self.prompt_low.values()
        return [*self.counts.values(), *low, self.prompt_high, self.ring_written]

    def pages_for(self, slots: int, kind: str = "high") -> int:
        """Pages of a kind of region that so many slots take."""
        return -(-slots // self.pool(kind).page_slots)

    def round_up(self, tokens: int) -> int:
        """Tokens rounded up to whole pages of `page_slots`."""
        return -(-tokens // self.page_slots) * self.page_slots

    def capacity(self, name: Pool) -> int:
        """Tokens (in all layers and kv heads) that the pages of a pool can hold."""
        pool = self.seat_pages.pools.get(name)
        return 0 if pool is None else pool.count // self.shape.heads * pool.page_slots

    def room_for(self, tokens: Mapping[Pool, int]) -> bool:
        """Whether so many more tokens, in all layers and kv heads, fit beside all promises."""
        pools = self.seat_pages.pools
        return all(
            -(-count // pools[name].page_slots) * self.shape.heads <= pools[name].unpromised
            for name, count in tokens.items()
        )

    def reserve(self, seat: Seat, tokens: Mapping[Pool, int]) -> None:
        """Promise a seat the pages for so many more tokens in each pool, in all layers and heads.

        They are used up by what the seat stores from then on, its copies of shared last pages
        included; a later call replaces what is left of them. Recent tokens are tokens at HIGH, but
        in pages of their own: their ring may take one page more per layer and kv head, and chunk
        summaries count as tokens too. OutOfPages where the pages are not there.
        """
        held = self.held(seat)
        for name, more in tokens.items():
            kind = next(kind for kind in FILLED_KINDS if KIND_POOL[kind] == name)
            used, slots = self.counts[kind][seat.id], self.pool(kind).page_slots
            grown = -(-(used + more) // slots) - -(-used // slots)
            pages = int(grown.sum()) * self.shape.kv_heads
            if not seat.owns_tails:
                shared = (kind for kind in held if KIND_POOL[kind] == name)
                pages += sum(self._shared_tails(seat, kind) for kind in shared)
            self.seat_pages.promise(seat.id, name, pages)

    def resident_bytes(self, seat: Seat) -> Stages:
        """Bytes of what a seat holds, by stage ("prompt", "decode") and kind of region.

        Whole pages count. The prompt's share are its resident tokens' slots, the statistics of its
        keys and the summaries of its chunks; decoded tokens and free slots are the decode stage's.
        A shared page counts for each of its holders: the bytes are those the sequence would take
        alone. A ring that is larger than feeding one token a step asks for counts as that one.
        """
        return count_bytes(self, seat)

    def resident_total(self, seat: Seat) -> int:
        """All of `resident_bytes` together."""
        stages = self.resident_bytes(seat)
        return sum(count for kinds in stages.values() for count in kinds.values())

    def full_bytes(self, prompt_tokens: int, decoded_tokens: int) -> int:
        """Bytes of a sequence that keeps every token at HIGH, pages rounded up."""
        slots = self.round_up(prompt_tokens + decoded_tokens)
        return self.shape.heads * slots * self.pool("high").slot_bytes

    def full_prompt_bytes(self, prompt_tokens: int) -> int:
        """Bytes of a whole prompt's slots; free slots count to the decode stage here too."""
        return self.shape.heads * prompt_tokens * self.pool("high").slot_bytes

    def pool_bytes(self) -> dict[Pool, tuple[int, int]]:
        """By pool: bytes of the pages that are held (shared ones once), and of all there are."""
        return {
            name: (pool.used * pool.page_bytes, pool.count * pool.page_bytes)
            for name, pool in self.seat_pages.pools.items()
        }

    def pool(self, kind: str) -> PagePool:
        return self.seat_pages.pool(kind)

    def held(self, seat: Seat) -> dict[str, np.ndarray]:
        """Pages per kv head that a seat holds, [layers], by kind of region."""
        held = {
            kind: -(-counts[seat.id] // self.pool(kind).page_slots)
            for kind, counts in self.counts.items()
        }
        held = {kind: pages for kind, pages in held.items() if pages.any()}
        if seat.acts and seat.recent >= 0:  # else nothing stays in the ring between two steps
            waiting = np.minimum(self.trails.waiting[seat.id, seat.decoded], seat.ring_slots)
            held["recent"] = -(-waiting // self.page_slots)
        if seat.choice is not None:
            chunks = -(-self.counts["high"][seat.id] // seat.choice.chunk)
            held["summary"] = -(-chunks // self.page_slots)
        return held

    def settle_low(self, seats: Sequence[Seat]) -> None:
        """Set the counts of low tokens from what has left the recent window."""
        ids = np.array([seat.id for seat in seats], dtype=np.int64)
        left = np.array([seat.left for seat in seats], dtype=np.int64)
        for level in {level for seat in seats for level in seat.decoded_levels}:
            gone = self.trails.low[level][ids, left]
            kind = low_kind(level)
            self.counts[kind][ids] = self.prompt_low[kind][ids] + gone

    def own_tails(self, seat: Seat) -> None:
        """Before a seat is written to: copy what it shares of its last pages and its ring."""
        if seat.owns_tails:
            return
        for kind, pages in self.held(seat).items():
            self.seat_pages.own(kind, seat.id, self._written(seat, kind), pages)
        seat.owns_tails = True

    def _shared_tails(self, seat: Seat, kind: str) -> int:
        """Pages, of all layers and kv heads, that `own_tails` would copy."""
        ids, _ = self.seat_pages.ids(
            kind, seat.id, self._written(seat, kind), self.held(seat)[kind]
        )
        return int((self.pool(kind).references[ids] > 1).sum())

    def _written(self, seat: Seat, kind: str) -> np.ndarray:
        """The first page of a kind that later tokens are written to, [layers]."""
        if kind == "recent":
            return np.zeros(self.shape.layers, dtype=np.int64)
        if kind == "summary":  # the last chunk is written to while it has room
            assert seat.choice is not None
            slots = self.counts["high"][seat.id] // seat.choice.chunk
        else:
            slots = self.counts[kind][seat.id]
        first: np.ndarray = slots // self.pool(kind).page_slots
        return first
