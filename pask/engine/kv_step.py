"""One step of decoding: rows of several sequences attend over what each of them may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels import append_bounds, append_high, choose_slots, paged_attention
from kernels.paged import KeyShift, Region
from pask.engine.kv_leave import Moving, by_head, on_device
from pask.engine.kv_mass import mass_by_token, stacked
from pask.engine.kv_plan import Plan, Run
from pask.engine.kv_seat import KIND_POOL, Seat, low_kind
from pask.engine.kv_values import check_values
from pask.methods.contract import SlotChoice

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings

__all__ = ["Run", "Step"]


@dataclass(frozen=True)
class _Part:
    """Rows that attend in one call: all of them, or those of one `SlotChoice` or with `mass`.

    `rows` None means all. stop, start: [layers, rows, kv_heads] int32 by kind of region.
    """

    choice: SlotChoice | None
    mass: bool
    rows: torch.Tensor | None
    sequence: torch.Tensor
    stop: dict[str, torch.Tensor]
    recent_start: torch.Tensor | None


class Step:
    """Made by `KVStore.begin`: call `attend` for each layer in turn, then `finish`.

    `resident_bytes` [rows] int64: what each row's sequence holds after it, had it been fed one
    token a step.
    """

    def __init__(
        self, store: Holdings, runs: Sequence[Run], *, mass: bool | Sequence[bool] = False
    ) -> None:
        if not runs:
            raise ValueError("a step feeds at least one sequence")
        self._wanted = [mass] * len(runs) if isinstance(mass, bool) else list(mass)
        self._store = store
        self._plan = plan = Plan(store, runs)
        for run, wanted in zip(runs, self._wanted, strict=True):
            if wanted and run.seat.choice is not None:
                raise ValueError("no mass by token where attention chooses its slots")
        for run in runs:
            store.own_tails(run.seat)
        plan.take_pages(store)
        store.seat_pages.sync()
        self.resident_bytes = plan.bytes
        self.finished = False
        self._layer = 0
        self._masses: list[torch.Tensor] = []  # by layer, [rows that want it, kv_heads, width]
        self._mass: dict[int, torch.Tensor] = {}  # by run, told by token
        self._name_tokens()
        self._sequence = self._tensor(plan.seats)
        self._high_slot = self._by_head(plan.high_slot)
        slot = plan.recent_slot
        waits = slot is not None and bool((slot >= 0).any())
        self._recent_slot = self._by_head(slot) if slot is not None and waits else None
        self._moving = [Moving.prepared(store, leavers) for leavers in plan.leavers]
        self._parts = self._split()
        self._ring = torch.from_numpy(store.rings).to(store.device)
        self._shifted = any(run.seat.has_statistics for run in runs)

    def rows_of(self, run: int) -> slice:
        """Where a run's rows lie among all rows."""
        end = int(self._plan.ends[run])
        return slice(end - self._plan.runs[run].length, end)

    def feeds(self, seat: Seat) -> bool:
        return any(run.seat is seat for run in self._plan.runs)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the rows' keys and values of a layer without attending: what is known already.

        k, v: [rows, kv_heads, head_dim] fp32, after RoPE. Layers ascend; ValueError otherwise.
        """
        self._append(layer, k, v)
        for part in self._parts:
            if part.choice is not None:
                assert part.rows is not None
                slots = self._high_slot[layer][part.rows]
                self._widen(part.choice, layer, part.sequence, slots, k[part.rows])

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`append`, then attend over all that each row may see.

        q: [rows, q_heads, head_dim]; answers [rows, q_heads, head_dim] fp32.
        """
        self._append(layer, k, v)
        shape = self._store.shape
        grouped = q.reshape(len(q), shape.kv_heads, -1, shape.head_dim)
        if len(self._parts) == 1 and self._parts[0].rows is None:
            return self._attend(self._parts[0], layer, grouped, k).view(q.shape)
        out = torch.empty_like(grouped)
        for part in self._parts:
            rows = part.rows
            assert rows is not None
            out[rows] = self._attend(part, layer, grouped[rows], k[rows])
        return out.view(q.shape)

    def finish(self) -> None:
        """Count the rows' tokens as stored. ValueError where a layer has not attended."""
        store, plan = self._store, self._plan
        if self.finished or self._layer != store.shape.layers:
            raise ValueError("a step is finished once, after all its layers")
        last = plan.ends - 1
        store.counts["high"][plan.run_seats] = plan.stop["high"][last]
        for run in plan.runs:
            run.seat.decoded += run.length
        if "recent" in plan.stop:
            store.settle_low([run.seat for run in plan.runs if run.seat.acts])
            written = np.maximum(store.ring_written[plan.run_seats], plan.stop["recent"][last])
            store.ring_written[plan.run_seats] = written
            plan.drop_rings(store)
        self.finished = True

    def mass(self, run: int) -> torch.Tensor:
        """Softmax probabilities that a run's queries put on each token of its sequence, summed over
        the run's rows and each kv head's query group.

        [layers, kv_heads, tokens] fp32, by position, prompt first; 0 where a token is not resident.
        For runs begun with `mass`, before any of these seats is changed again.
        """
        if not self._wanted[run] or len(self._masses) != self._store.shape.layers:
            raise ValueError("no mass was asked for, or not all layers have attended")
        if not self._mass:
            wanting = [number for number, wanted in enumerate(self._wanted) if wanted]
            masses = stacked(self._masses)
            self._mass = mass_by_token(self._store, self._plan, wanting, masses)
        return self._mass[run]

    def _append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer != self._layer:
            raise ValueError(f"layer {layer} given, layer {self._layer} is next")
        self._layer += 1
        store = self._store
        if store.device.type == "cpu":  # on a GPU the host would have to wait for it
            for values in (k, v):
                check_values(layer, values, store.dtype)
        shift = self._shift(layer)
        for moving in self._moving:
            if not moving.fed_now:  # before a new token takes its ring slot
                moving.quantise(store, layer, shift)
        for kind, slot in (("high", self._high_slot), ("recent", self._recent_slot)):
            if slot is not None:
                table = store.seat_pages.tables[kind].layer(layer)
                append_high(store.pool(kind).high, table, self._sequence, slot[layer], k, v)
        for moving in self._moving:
            if moving.fed_now:
                moving.quantise(store, layer, shift)

    def _attend(self, part: _Part, layer: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        chosen = None if part.choice is None else self._choose(part, layer, q, k)
        regions = [
            self._region(part, kind, layer)
            for kind in KIND_POOL
            if kind in part.stop
            if kind != "summary"
        ]
        shift = self._shift(layer)
        if not part.mass:
            return paged_attention(q, part.sequence, regions, shift, chosen=chosen)
        out, mass = paged_attention(q, part.sequence, regions, shift, probabilities=True)
        self._masses.append(mass.sum(dim=2))
        return out

    def _shift(self, layer: int) -> KeyShift | None:
        return self._store.statistics.shift(layer) if self._shifted else None

    def _region(self, part: _Part, kind: str, layer: int) -> Region:
        ring = kind == "recent"
        return Region(
            self._store.pool(kind).pages,
            self._store.seat_pages.tables[kind].layer(layer),
            part.stop[kind][layer],
            part.recent_start[layer] if ring and part.recent_start is not None else None,
            self._ring if ring else None,
        )

    def _choose(self, part: _Part, layer: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The slots that each row reads: rank by rank, so that a run's row knows no later one."""
        choice, rows = part.choice, part.rows
        assert choice is not None
        assert rows is not None
        ranks = self._plan.rank[rows.cpu().numpy()]
        bounds = self._region(part, "summary", layer)
        slots = self._high_slot[layer][rows]
        # No more than there are: the rest of the width would be empty.
        count = min(choice.count, int(self._plan.stop["high"].max()))
        chosen = torch.empty(*slots.shape, count, dtype=torch.int32, device=q.device)
        for rank in range(int(ranks.max()) + 1):
            now = torch.from_numpy(np.flatnonzero(ranks == rank)).to(q.device)
            sequence = part.sequence[now]
            self._widen(choice, layer, sequence, slots[now], k[now])
            chosen[now] = choose_slots(
                q[now],
                sequence,
                Region(bounds.pages, bounds.table, bounds.stop[now]),
                part.stop["high"][layer][now],
                choice.chunk,
                choice.channels,
                count,
            )
        return chosen

    def _widen(
        self,
        choice: SlotChoice,
        layer: int,
        sequence: torch.Tensor,
        slots: torch.Tensor,
        k: torch.Tensor,
    ) -> None:
        """Let the bounds of chunks take in keys, rows in order."""
        pool, table = self._store.pool("summary").high, self._store.seat_pages.tables["summary"]
        append_bounds(pool, table.layer(layer), sequence, slots, k, choice.chunk)

    def _split(self) -> list[_Part]:
        """The rows by how they attend."""
        plan = self._plan
        kinds = {kind for kind, stop in plan.stop.items() if stop.any()}
        ways = [
            (run.seat.choice, wanted) for run, wanted in zip(plan.runs, self._wanted, strict=True)
        ]
        if len(set(ways)) == 1 and ways[0][0] is None:
            return [self._part(*ways[0], None, kinds)]
        lengths = [run.length for run in plan.runs]
        parts = []
        for way in dict.fromkeys(ways):
            rows = np.flatnonzero(np.repeat([other == way for other in ways], lengths))
            parts.append(self._part(*way, rows, kinds))
        return parts

    def _part(
        self, choice: SlotChoice | None, mass: bool, rows: np.ndarray | None, kinds: set[str]
    ) -> _Part:
        plan = self._plan
        pick = slice(None) if rows is None else rows
        start = plan.recent_start
        return _Part(
            choice,
            mass,
            None if rows is None else torch.from_numpy(rows).to(self._store.device),
            self._sequence if rows is None else self._tensor(plan.seats[rows]),
            {kind: self._by_head(plan.stop[kind][pick]) for kind in plan.stop if kind in kinds},
            self._by_head(start[pick]) if start is not None and "recent" in kinds else None,
        )

    def _name_tokens(self) -> None:
        """Say which token each newly used slot stands for."""
        plan = self._plan
        for kind, slots in (("high", plan.high_slot), ("recent", plan.recent_slot)):
            if slots is not None:
                self._name(kind, plan.seats, slots, plan.positions)
        for leavers in plan.leavers:
            self._name(low_kind(leavers.level), leavers.seats, leavers.target, leavers.tokens)

    def _name(self, kind: str, seats: np.ndarray, slots: np.ndarray, tokens: np.ndarray) -> None:
        page, place = self._store.seat_pages.at(kind, seats, slots.T)
        names = self._store.pool(kind).tokens
        if (slots >= 0).all():
            names[page, place] = tokens[:, None]
            return
        used = np.broadcast_to((slots.T >= 0)[:, :, None], page.shape)
        of_token = np.broadcast_to(tokens[:, None], page.shape)
        names[page[used], np.broadcast_to(place, page.shape)[used]] = of_token[used]

    def _by_head(self, slots: np.ndarray) -> torch.Tensor:
        return by_head(slots, self._store.shape.kv_heads, self._store.device)

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return on_device(numbers, self._store.device)
