"""What each row of a step may see, worked out before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pask.engine.kv_bytes import statistics_bytes
from pask.engine.kv_seat import CHANNEL2, Seat, low_kind
from pask.engine.kv_tables import Growth
from pask.methods.levels import Level

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings


@dataclass(frozen=True)
class Run:
    """The next `rows` tokens of a seat, fed in one step; the last sees all before it.

    `levels` [rows, layers] int8: where each token ends in each layer (`Level`'s value); None for
    HIGH throughout. `rows` may be left out where there are levels.
    """

    seat: Seat
    levels: np.ndarray | None = None
    rows: int = 0

    def __post_init__(self) -> None:
        if self.levels is not None and self.rows not in (0, len(self.levels)):
            raise ValueError(f"levels of {len(self.levels)} tokens for {self.rows} rows")
        if self.length < 1:
            raise ValueError("a run feeds at least one token")

    @property
    def length(self) -> int:
        return self.rows if self.levels is None else len(self.levels)


@dataclass(frozen=True)
class Leavers:
    """Tokens that leave the recent window in this step and end at one low level.

    Token m (position tokens[m] of seats[m]) lies in ring slot ring[m, layer] (wrapped) and goes to
    slot target[m, layer] of the low region; -1 in layers where it ends elsewhere. `fed_now`: the
    tokens are among the rows.
    """

    level: Level
    fed_now: bool
    seats: np.ndarray
    tokens: np.ndarray
    ring: np.ndarray
    target: np.ndarray


class Plan:
    """Rows are the runs' tokens, run after run; [rows, layers] below are slot counts or slots.

    `stop[kind]`: slots of the region that a row may see; `recent_start`: the first of the ring's
    that it still may. `high_slot`, `recent_slot`: where its own token goes, -1 for nowhere.
    """

    def __init__(self, store: Holdings, runs: Sequence[Run]) -> None:
        self.runs = runs
        seats = [run.seat for run in runs]
        self._lengths = np.array([run.length for run in runs], dtype=np.int64)
        self.ends = np.cumsum(self._lengths)
        self.run_seats = np.array([seat.id for seat in seats], dtype=np.int64)
        if len(set(self.run_seats.tolist())) < len(runs):
            raise ValueError("a seat has two runs in one step")
        self._of_run = np.repeat(np.arange(len(runs)), self._lengths)
        self.seats = self.run_seats[self._of_run]
        self._starts = (self.ends - self._lengths)[self._of_run]
        self.rank = np.arange(len(self.seats)) - self._starts
        self._decoded = np.array([seat.decoded for seat in seats], dtype=np.int64)
        self._recent = np.array([seat.recent for seat in seats], dtype=np.int64)
        self._prompts = np.array([seat.prompt_tokens for seat in seats], dtype=np.int64)
        self.positions = (self._prompts + self._decoded)[self._of_run] + self.rank
        if int(self.positions.max()) >= store.max_tokens:
            raise ValueError(
                f"{int(self.positions.max()) + 1} tokens in a sequence, the store takes "
                f"{store.max_tokens}"
            )
        self.stop: dict[str, np.ndarray] = {}
        self.recent_start: np.ndarray | None = None
        self.recent_slot: np.ndarray | None = None
        self.leavers: list[Leavers] = []
        self._growths: list[Growth] = []
        self._passed: dict[int, np.ndarray] = {}  # ring pages by seat, held for this step alone
        levels = self._levels(store)
        self._plan_high(store, levels)
        if any(seat.acts for seat in seats):
            self._plan_recent(store, levels)
        self._plan_low(store)
        self.bytes = self._count(store)

    def rows(self, run: int) -> slice:
        return slice(int(self.ends[run] - self._lengths[run]), int(self.ends[run]))

    def drop_rings(self, store: Holdings) -> None:
        """Let go of the ring pages of seats in whose rings nothing stays."""
        for seat, pages in self._passed.items():
            store.seat_pages.cut("recent", seat, pages, np.zeros_like(pages))

    def take_pages(self, store: Holdings) -> None:
        """Take the pages of all that will be stored; OutOfPages where they are not there."""
        store.seat_pages.grow(self._growths)

    def _levels(self, store: Holdings) -> np.ndarray | None:
        """Where the rows' tokens end, [rows, layers]; None where all do at HIGH."""
        if all(run.levels is None for run in self.runs):
            return None
        levels = np.full((len(self.seats), store.shape.layers), Level.HIGH, dtype=np.int8)
        for number, run in enumerate(self.runs):
            if run.levels is None:
                continue
            if run.levels.shape[1:] != (store.shape.layers,):
                raise ValueError(f"levels must be [rows, layers={store.shape.layers}]")
            levels[self.rows(number)] = run.levels
        known = (levels >= Level.RELEASE) & (levels <= Level.HIGH)
        if not (known & store.allowed[self.seats[:, None], np.where(known, levels, 0)]).all():
            raise ValueError("a decoded token's level is not among the seat's")
        return levels

    def _plan_high(self, store: Holdings, levels: np.ndarray | None) -> None:
        old = store.counts["high"][self.seats]
        if levels is None:
            self.stop["high"] = old + (self.rank + 1)[:, None]
            self.high_slot = self.stop["high"] - 1
        else:
            high = levels == Level.HIGH
            total = np.cumsum(high, axis=0)
            self.stop["high"] = old + total - (total[self._starts] - high[self._starts])
            self.high_slot = np.where(high, self.stop["high"] - 1, -1)
        self._grow(store, "high", store.counts["high"][self.run_seats])
        for number, run in enumerate(self.runs):
            if run.seat.choice is not None:
                self._plan_summary(store, number, run.seat.choice.chunk)

    def _plan_summary(self, store: Holdings, number: int, chunk: int) -> None:
        if "summary" not in self.stop:
            self.stop["summary"] = np.zeros_like(self.stop["high"])
        rows = self.rows(number)
        self.stop["summary"][rows] = -(-self.stop["high"][rows] // chunk)
        seat = self.run_seats[number : number + 1]
        old = store.held(self.runs[number].seat)["summary"][None]
        last = self.stop["summary"][rows.stop - 1]
        self._growths.append(Growth("summary", seat, old, -(-last[None] // store.page_slots)))

    def _plan_recent(self, store: Holdings, levels: np.ndarray | None) -> None:
        """Ring slots of the rows, and what leaves the window while they are fed."""
        trails, acts = store.trails, np.array([run.seat.acts for run in self.runs])
        rows = np.flatnonzero(acts[self._of_run])
        seats, of_run = self.seats[rows], self._of_run[rows]
        fed = self._decoded[of_run] + self.rank[rows]
        if levels is None:
            levels = np.full((len(self.seats), store.shape.layers), Level.HIGH, dtype=np.int8)
        # Entries behind a seat's decoded tokens: of no meaning until the step is finished.
        starts = np.searchsorted(rows, self._starts[rows])
        trails.write(seats, fed, starts, levels[rows])

        size = (len(self.seats), store.shape.layers)
        self.stop["recent"] = np.zeros(size, dtype=np.int64)
        self.recent_start = np.zeros(size, dtype=np.int64)
        self.recent_slot = np.full(size, -1)
        stop = trails.waiting[seats, fed + 1]
        start = trails.waiting[seats, np.maximum(fed - self._recent[of_run], 0)]
        self.stop["recent"][rows], self.recent_start[rows] = stop, start
        ring = store.rings[seats][:, None]
        self.recent_slot[rows] = np.where(levels[rows] == Level.HIGH, -1, (stop - 1) % ring)
        # A token that is lowered at once still passes through the ring.
        oldest = trails.waiting[seats, np.maximum(fed - np.maximum(self._recent, 0)[of_run], 0)]
        long = np.flatnonzero((stop - oldest[starts] > ring).any(axis=1))
        if len(long):
            seat = self.runs[of_run[long[0]]].seat
            raise ValueError(f"the run does not fit the seat's ring, {seat.longest_run} tokens do")

        runs = np.flatnonzero(acts)
        seats, most = self.run_seats[runs], store.rings[self.run_seats[runs]][:, None]
        old, new = (
            -(-np.minimum(trails.waiting[seats, count], most) // store.page_slots)
            for count in (self._decoded[runs], self._decoded[runs] + self._lengths[runs])
        )
        through = self._recent[runs] < 0  # what is lowered at once has pages for this step alone
        used = trails.waiting[seats, self._decoded[runs] + self._lengths[runs]]
        used = used > trails.waiting[seats, self._decoded[runs]]
        old = np.where(through[:, None], 0, old)
        new = np.where(through[:, None], used * (most // store.page_slots), new)
        self._growths.append(Growth("recent", seats, old, new))
        self._passed = {int(seat): new[n] for n, seat in enumerate(seats) if through[n]}
        self._plan_leavers(store, runs)

    def _plan_leavers(self, store: Holdings, runs: np.ndarray) -> None:
        first, last = (
            np.maximum(count - 1 - self._recent[runs], 0)
            for count in (self._decoded[runs], self._decoded[runs] + self._lengths[runs])
        )
        number = np.repeat(np.arange(len(runs)), last - first)
        if not len(number):
            return
        starts = np.cumsum(last - first) - (last - first)
        tokens, of_run = (first - starts)[number] + np.arange(len(number)), runs[number]
        seats, now = self.run_seats[of_run], tokens >= self._decoded[of_run]
        for level in self._decoded_levels():
            counts = store.trails.low[level]
            before = counts[seats, tokens]
            ends_here = counts[seats, tokens + 1] > before
            prompt = store.prompt_low[low_kind(level)][seats]
            target = np.where(ends_here, prompt + before, -1)
            for fed_now in (False, True):
                these = np.flatnonzero((now == fed_now) & ends_here.any(axis=1))
                if not len(these):
                    continue
                ring = store.trails.waiting[seats, tokens] % store.rings[seats][:, None]
                positions = self._prompts[of_run] + tokens
                self.leavers.append(
                    Leavers(
                        level, fed_now, seats[these], positions[these], ring[these], target[these]
                    )
                )

    def _plan_low(self, store: Holdings) -> None:
        if any(run.seat.channel_keys for run in self.runs):
            self.stop[CHANNEL2] = store.counts[CHANNEL2][self.seats]
        for level in self._decoded_levels():
            kind = low_kind(level)
            stop = store.counts[kind][self.seats]
            rows = np.flatnonzero(
                np.array([run.seat.acts and level in run.seat.decoded_levels for run in self.runs])[
                    self._of_run
                ]
            )
            if len(rows):
                seats, of_run = self.seats[rows], self._of_run[rows]
                fed = self._decoded[of_run] + self.rank[rows]
                left = np.maximum(fed - self._recent[of_run], 0)
                gone = store.trails.low[level][seats, left]
                stop[rows] = store.prompt_low[kind][seats] + gone
            self.stop[kind] = stop
            self._grow(store, kind, store.counts[kind][self.run_seats])

    def _decoded_levels(self) -> list[Level]:
        """The low levels at which decoded tokens may end, of all seats together."""
        return sorted({level for run in self.runs for level in run.seat.decoded_levels})

    def _grow(self, store: Holdings, kind: str, old: np.ndarray) -> None:
        """Pages from `old` [runs, layers] slots to those of each run's last row."""
        new = self.stop[kind][self.ends - 1]
        size = store.page_slots
        self._growths.append(Growth(kind, self.run_seats, -(-old // size), -(-new // size)))

    def _count(self, store: Holdings) -> np.ndarray:
        """Bytes that each row's seat holds after it, fed one token a step; [rows] int64."""
        total = np.zeros(len(self.seats), dtype=np.int64)
        for kind, stop in self.stop.items():
            pages = -(-stop // store.pool(kind).page_slots)
            if kind == "recent":
                least = np.minimum(
                    -(-(self._recent + 1) // store.page_slots),
                    store.rings[self.run_seats] // store.page_slots,
                )
                pages = np.minimum(pages, least[self._of_run][:, None])
            total += pages.sum(axis=1) * (store.shape.kv_heads * store.pool(kind).page_bytes)
        if any(run.seat.has_statistics for run in self.runs):
            statistics = np.array([statistics_bytes(store, run.seat) for run in self.runs])
            total += statistics[self._of_run]
        return total
