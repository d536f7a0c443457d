"""The KV of all sequences: what is resident, at which precision, in pages that all share.

Slots are not positions: keys are kept after RoPE at their original positions, so a slot may hold
any token. Of a sequence each layer and kv head keeps its tokens in regions: `high` (16 bit), one
for each low level in use, and `recent`, a ring of 16-bit slots in which decoded tokens that do not
end at HIGH wait until they leave the recent window. A token is computed once, rounded to 16 bit,
and all that is stored of it later starts from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pask.engine.kv_check import Tokens, check, dense
from pask.engine.kv_evict import EvictionRefused, remove
from pask.engine.kv_holdings import Holdings
from pask.engine.kv_prompt import put_prompt
from pask.engine.kv_seat import CHANNEL2, KVShape, Pool, Seat, pool_slots
from pask.engine.kv_step import Run, Step
from pask.engine.kv_values import rounded
from pask.engine.pages import OutOfPages
from pask.methods.contract import Placement, SlotChoice
from pask.methods.levels import Level

__all__ = ["KVShape", "KVStore", "OutOfPages", "Run", "Seat", "SlotChoice", "Step"]

KV_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class KVStore(Holdings):
    """Room for `seats` sequences of up to `max_tokens` tokens, in so many `pages` of each pool.

    A level without an entry in `pages` cannot be used, nor CHANNEL2; HIGH must have one. Raises
    ValueError where low levels meet a head_dim that is no multiple of 32.
    """

    _step: Step | None = None  # the last one that was begun

    @classmethod
    def sized(
        cls,
        shape: KVShape,
        capacity_tokens: int,
        mix: Mapping[Pool, float] | None = None,
        *,
        page_slots: int = 16,
        **rest: Any,
    ) -> KVStore:
        """Pages for so many tokens, of which the share `mix` says is in each pool (all at HIGH,
        unless said); further arguments as for a store."""
        shares: Mapping[Pool, float] = {Level.HIGH: 1.0} if mix is None else mix
        pages = {
            name: -int(-capacity_tokens * share // pool_slots(name, page_slots)) * shape.heads
            for name, share in shares.items()
        }
        return cls(shape, pages, page_slots=page_slots, **rest)

    # Seats

    def open(
        self,
        prompt_tokens: int,
        *,
        recent: int = 0,
        levels: frozenset[Level] = frozenset(),
        normalise: bool = True,
        acts: bool | None = None,
        ring_slots: int | None = None,
        choice: SlotChoice | None = None,
        channel_keys: bool = False,
    ) -> Seat:
        """A seat for a sequence with a prompt of so many tokens, nothing of it stored yet.

        `levels`: the low levels that its tokens may have. `acts`: decoded tokens may end below HIGH
        (by default, where there are `levels` or a `recent` window); they wait in a ring of
        `ring_slots`, by default just enough to feed one token a step. `channel_keys`: keys at LOW2
        are quantised by channel; only prompt tokens are there then. Raises ValueError where no seat
        is free or the store has no pages of a level.
        """
        pools = self.seat_pages.pools
        for level in levels:
            name = CHANNEL2 if channel_keys and level is Level.LOW2 else level
            if not level.is_low or name not in pools:
                raise ValueError(f"the store has no low pages for {level.name}")
        if channel_keys and normalise:
            raise ValueError("keys that are quantised by channel are stored plain")
        if not 0 < prompt_tokens <= self.max_tokens:
            raise ValueError(f"{prompt_tokens} prompt tokens, the store takes 1..{self.max_tokens}")
        if None not in self.seats:
            raise ValueError(f"all {len(self.seats)} seats are taken")
        if acts is None:
            acts = bool(levels) or recent > 0
        if choice is not None and acts:
            raise ValueError("chosen slots go with tokens that all end at HIGH")
        room = self.round_up(self.max_tokens)
        ring = min(self.round_up(max(recent + 1, 1, ring_slots or 0)), room)
        seat = Seat(
            id=self.seats.index(None),
            prompt_tokens=prompt_tokens,
            recent=recent,
            levels=levels,
            normalise=normalise,
            ring_slots=ring,
            longest_run=ring - max(recent, 0) if acts and ring < room else self.max_tokens,
            acts=acts,
            choice=choice,
            channel_keys=channel_keys,
        )
        self.seats[seat.id] = seat
        self.rings[seat.id] = ring
        self.allowed[seat.id] = [
            level == Level.HIGH
            or (acts and (level == Level.RELEASE or level in seat.decoded_levels))
            for level in range(Level.HIGH + 1)
        ]
        for counts in self._by_layer:
            counts[seat.id] = 0
        return seat

    def add_prompt(
        self,
        seats: Sequence[Seat],
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        placement: Placement | None = None,
    ) -> None:
        """Store a layer's prompt as `placement` says, one copy for all `seats`; ascending layers.

        keys, values: [kv_heads, prompt_tokens, head_dim], after RoPE. Low keys are freed of their
        statistics over the whole prompt, whatever is kept of it. PaskError where a value is not
        finite, or not in the store's dtype; OutOfPages; ValueError for a placement at a level that
        a seat does not have, or seats that differ in what is stored for them.
        """
        for seat in seats:
            self._expect(seat, layer)
            if keys.shape[1] != seat.prompt_tokens:
                raise ValueError(f"{keys.shape[1]} tokens given, {seat.prompt_tokens} expected")
        stored = [rounded(layer, full, self.dtype) for full in (keys, values)]
        put_prompt(self, seats, layer, stored[0], stored[1], placement)

    def place(
        self, seat: Seat, placements: Placement | Sequence[Placement] | None, **kind: Any
    ) -> Seat:
        """A new seat with the prompt of `seat`, placed as another method would: without a prefill.

        `seat` must hold its whole prompt at HIGH; what it has decoded does not matter. Where a
        layer is kept whole its pages are shared. Further arguments as for `open`; errors as for
        `add_prompt`.
        """
        everything = seat.prompt_tokens * self.shape.kv_heads
        if seat.evicted or (self.prompt_high[seat.id] != everything).any():
            raise ValueError("the seat does not hold its whole prompt at HIGH")
        other = self.open(seat.prompt_tokens, **kind)
        try:
            for layer in range(self.shape.layers):
                placed = placements[layer] if isinstance(placements, Sequence) else placements
                self._place(seat, other, layer, placed)
        except ValueError:
            self.free(other)
            raise
        return other

    def fork(self, seat: Seat) -> Seat:
        """A seat that holds the same pages; either copies a page before it writes there."""
        self._idle(seat)
        other = self.open(
            seat.prompt_tokens,
            recent=seat.recent,
            levels=seat.levels,
            normalise=seat.normalise,
            acts=seat.acts,
            ring_slots=seat.ring_slots,
            choice=seat.choice,
            channel_keys=seat.channel_keys,
        )
        for kind, pages in self.held(seat).items():
            for layer in np.flatnonzero(pages):
                self.seat_pages.share(kind, seat.id, other.id, int(layer), int(pages[layer]))
        for counts in self._by_layer:
            counts[other.id] = counts[seat.id]
        if seat.has_statistics:
            self.statistics.copy(seat.id, other.id)
        if seat.acts:
            self.trails.copy(seat.id, other.id, seat.decoded)
        other.decoded, other.cut_from = seat.decoded, seat.cut_from
        other.layers_placed, other.evicted = seat.layers_placed, seat.evicted
        for part in (seat, other):
            part.shares, part.owns_tails = True, False
        return other

    def free(self, seat: Seat) -> None:
        """Let go of all that a seat holds and was promised; the seat is of no use afterwards."""
        self._idle(seat)
        self.seat_pages.forget_promises(seat.id)
        for kind, pages in self.held(seat).items():
            self.seat_pages.cut(kind, seat.id, pages, np.zeros_like(pages))
        if seat.has_statistics:
            self.statistics.clear(seat.id)
        self.seats[seat.id] = None

    # Decoding

    def begin(self, runs: Sequence[Run], *, mass: bool | Sequence[bool] = False) -> Step:
        """Take the pages for the next tokens of some seats and say what each of them may see.

        With `mass` (for all runs, or for each), the step can tell afterwards what attention was
        paid to whom. OutOfPages, and no token stored, where they do not fit. ValueError for a run
        longer than `longest_run`, a token at a level that its seat does not have, or another step
        that is not finished.
        """
        if self._step is not None and not self._step.finished:
            raise ValueError("the last step is not finished")
        for run in runs:
            self._idle(run.seat)
            if run.seat.layers_placed != self.shape.layers:
                raise ValueError("the prompt is not stored in all layers")
        self._step = Step(self, runs, mass=mass)
        return self._step

    def evict(self, seat: Seat, tokens: torch.Tensor | np.ndarray) -> None:
        """Remove tokens (prompt and decoded, by position) from HIGH: [layers, kv_heads, n] int64.

        The last live slot of a head moves into each hole. A layer may name fewer tokens than n, the
        same number in all its heads, followed by -1. ValueError where a token is not resident at
        HIGH or named twice.
        """
        self.evict_together([seat], [tokens])

    def evict_together(
        self, seats: Sequence[Seat], tokens: Sequence[torch.Tensor | np.ndarray]
    ) -> None:
        """`evict` for several seats at once, none of them twice: all of it or, with
        `EvictionRefused` (a ValueError that has the seat's number), nothing."""
        for number, seat in enumerate(seats):
            self._idle(seat)
            if seat.choice is not None:
                raise EvictionRefused(number, "a seat with chunk summaries keeps its tokens")
        host = [some.cpu() if isinstance(some, torch.Tensor) else some for some in tokens]
        remove(self, seats, [np.asarray(some, dtype=np.int64) for some in host])

    def truncate(self, seat: Seat, decoded: int) -> None:
        """Forget the decoded tokens from number `decoded` on, as if they had never been fed.

        ValueError where tokens were evicted since, or the ring has lost what the recent window held
        then; with one more slot than the longest run needs (`ring_slots`) it never has for the last
        step.
        """
        self._idle(seat)
        if not seat.cut_from <= decoded <= seat.decoded or seat.choice is not None:
            raise ValueError(
                f"cannot cut at {decoded} of {seat.decoded} decoded tokens: later ones, evictions "
                "and chunk summaries stay"
            )
        before, high = self.held(seat), np.full(self.shape.layers, seat.decoded - decoded)
        if seat.acts:
            waiting = self.trails.waiting[seat.id]
            kept_from = waiting[max(decoded - 1 - seat.recent, 0)]
            lost = self.ring_written[seat.id] - kept_from > seat.ring_slots
            if seat.recent >= 0 and lost.any():
                raise ValueError(f"the ring has lost what the window held at {decoded}")
            high -= waiting[seat.decoded] - waiting[decoded]
        seat.decoded = decoded
        self.counts["high"][seat.id] -= high
        if seat.acts:  # another's low tokens all come from its prompt
            self.settle_low([seat])
        for kind, pages in before.items():
            left = self.held(seat).get(kind, np.zeros_like(pages))
            self.seat_pages.cut(kind, seat.id, pages, left)
        seat.owns_tails = not seat.shares

    # What there is

    def dense(self, seat: Seat, layer: int) -> dict[str, Tokens]:
        """What a seat holds in a layer: by kind of region (tokens [kv_heads, n], keys, values
        [kv_heads, n, head_dim]), low ones dequantised, in slot order."""
        return dense(self, seat, layer)

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken (between two steps)."""
        assert self._step is None or self._step.finished
        check(self)

    def _place(self, source: Seat, seat: Seat, layer: int, placement: Placement | None) -> None:
        pages = self.pages_for(source.prompt_tokens)
        whole = placement is None or placement.tokens is None
        host = self.seat_pages.tables["high"].host
        ids = torch.from_numpy(host[layer, source.id, :, :pages].astype(np.int64))
        if not whole or seat.has_statistics or seat.choice is not None:
            data = self.pool("high").high.data[ids.to(self.device)]
            both = data.transpose(1, 2).flatten(2, 3)[:, :, : source.prompt_tokens]
        if whole and seat.choice is None:
            self._expect(seat, layer)
            if seat.has_statistics:
                self.statistics.measure(layer, [seat.id], both[:, 0])
            self.seat_pages.share("high", source.id, seat.id, layer, pages)
            self.counts["high"][seat.id, layer] = source.prompt_tokens
            self.prompt_high[seat.id, layer] = self.prompt_high[source.id, layer]
            seat.layers_placed += 1
            for part in (source, seat):
                part.shares, part.owns_tails = True, False
        else:
            put_prompt(self, [seat], layer, both[:, 0], both[:, 1], placement)

    def _expect(self, seat: Seat, layer: int) -> None:
        self._idle(seat)
        if layer != seat.layers_placed:
            raise ValueError(f"layer {layer} given, layer {seat.layers_placed} is next")

    def _idle(self, seat: Seat) -> None:
        if self.seats[seat.id] is not seat:
            raise ValueError("the seat was freed")
        if self._step is not None and not self._step.finished and self._step.feeds(seat):
            raise ValueError("the seat's step is not finished")
