"""Which pages belong to which seat, layer and kv head: page tables over the pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pask.engine.kv_seat import KIND_POOL, KVShape, Pool
from pask.engine.pages import Ids, PagePool

Places = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Layer, kv head and number in the table of pages, [n] each."""


class PageTable:
    """The pages of one kind of region: `host` [layers, seats, kv_heads, table_pages] int32.

    An entry means something only up to the number of pages that a seat holds in a layer, which
    follows from its token counts.
    """

    def __init__(
        self, shape: KVShape, seats: int, table_pages: int, device: torch.device | str
    ) -> None:
        size = (shape.layers, seats, shape.kv_heads, table_pages)
        self.host = np.zeros(size, dtype=np.int32)
        with torch.inference_mode(False):
            on_host = torch.from_numpy(self.host)
            self._shared = torch.device(device).type == "cpu"
            self._tensor = on_host if self._shared else on_host.to(device)
        self._changed: set[int] = set()

    def layer(self, layer: int) -> torch.Tensor:
        """[seats, kv_heads, table_pages] as the kernels take it, as of the last `sync`."""
        return self._tensor[layer]

    def changed(self, seats: np.ndarray) -> None:
        if not self._shared:
            self._changed.update(seats.tolist())

    def sync(self) -> None:
        """Bring what has changed to the device."""
        if self._changed:
            seats = sorted(self._changed)
            fresh = torch.from_numpy(self.host[:, seats]).to(self._tensor.device)
            self._tensor[:, seats] = fresh
            self._changed.clear()


@dataclass(frozen=True)
class Growth:
    """Pages that seats come to hold: seats [n], and per layer the pages before and after,
    `old` and `new` [n, layers]; each for every kv head."""

    kind: str
    seats: np.ndarray
    old: np.ndarray
    new: np.ndarray

    @property
    def need(self) -> np.ndarray:
        """Pages per kv head, [n, layers]."""
        need: np.ndarray = np.maximum(self.new - self.old, 0)
        return need


class SeatPages:
    """The tables of all kinds of region, and the pages promised to seats but not taken yet."""

    def __init__(
        self,
        shape: KVShape,
        pools: Mapping[Pool, PagePool],
        seats: int,
        max_tokens: int,
        device: torch.device | str,
    ) -> None:
        self.shape = shape
        self.pools = pools
        self.tables = {
            kind: PageTable(shape, seats, -(-max_tokens // pools[name].page_slots), device)
            for kind, name in KIND_POOL.items()
            if name in pools
        }
        self.promised = {name: np.zeros(seats, dtype=np.int64) for name in pools}
        self._promised_to: set[tuple[int, Pool]] = set()
        self._heads = np.arange(shape.kv_heads)

    def sync(self) -> None:
        for table in self.tables.values():
            table.sync()

    def pool(self, kind: str) -> PagePool:
        return self.pools[KIND_POOL[kind]]

    def promise(self, seat: int, name: Pool, pages: int) -> None:
        """Let so many further pages be the seat's, in place of what it was promised before.

        OutOfPages where there are not as many; then its old promise stands.
        """
        pool, promised = self.pools[name], self.promised[name]
        before = int(promised[seat])
        pool.require(pages, before)
        pool.unreserve(before)
        pool.reserve(pages)
        promised[seat] = pages
        self._promised_to.add((seat, name))

    def forget_promises(self, seat: int) -> None:
        for name, promised in self.promised.items():
            self.pools[name].unreserve(int(promised[seat]))
            promised[seat] = 0
            self._promised_to.discard((seat, name))

    def grow(self, growths: Sequence[Growth]) -> None:
        """Take pages for seats, out of what they were promised first.

        OutOfPages, and nothing changed, where one pool has too few for all of them together.
        """
        by_pool: dict[Pool, list[Growth]] = {}
        for growth in growths:
            if growth.need.any():
                by_pool.setdefault(KIND_POOL[growth.kind], []).append(growth)
        wanted = {}
        for name, group in by_pool.items():
            seats = np.concatenate([growth.seats for growth in group])
            pages = np.concatenate([growth.need.sum(axis=1) for growth in group])
            wanted[name] = self._by_seat(name, seats, pages * self.shape.kv_heads)
            self.pools[name].require(*(int(part.sum()) for part in wanted[name]))
        for name, group in by_pool.items():
            ids = self._take(name, *wanted[name])
            for growth in group:
                ids = self._enter(growth, ids)

    def cut(self, kind: str, seat: int, old: np.ndarray, new: np.ndarray) -> None:
        """Let go of pages `new` .. `old` (by layer, [layers]) of a seat.

        What becomes free by it is promised to the seat again where it had a promise.
        """
        ids, _ = self.ids(kind, seat, new, old)
        if not len(ids):
            return
        freed = self.pool(kind).release(ids)
        name = KIND_POOL[kind]
        if (seat, name) in self._promised_to:
            self.pool(kind).reserve(freed)
            self.promised[name][seat] += freed

    def own(self, kind: str, seat: int, first: np.ndarray, last: np.ndarray) -> None:
        """Make a seat the only holder of its pages `first` .. `last` ([layers]) of a kind, by a
        copy where it is not: copy-on-write."""
        ids, at = self.ids(kind, seat, first, last)
        pool = self.pool(kind)
        shared = np.flatnonzero(pool.references[ids] > 1)
        if len(shared):
            layer, head, page = at
            self._own(kind, seat, ids[shared], (layer[shared], head[shared], page[shared]))

    def own_entries(
        self, kind: str, seat: int, layer: np.ndarray, head: np.ndarray, page: np.ndarray
    ) -> None:
        """The same for the table entries named one by one, [n] each, repeats allowed."""
        ids = self.tables[kind].host[layer, seat, head, page]
        shared = np.flatnonzero(self.pool(kind).references[ids] > 1)
        if len(shared):
            shared = shared[np.unique(ids[shared], return_index=True)[1]]
            self._own(kind, seat, ids[shared], (layer[shared], head[shared], page[shared]))

    def share(self, kind: str, source: int, target: int, layer: int | slice, pages: int) -> None:
        """Let a seat hold the first `pages` pages of another's layer(s) too."""
        host = self.tables[kind].host
        entries = host[layer, source, :, :pages]
        host[layer, target, :, :pages] = entries
        self.tables[kind].changed(np.array([target]))
        self.pool(kind).share(entries.ravel())

    def ids(self, kind: str, seat: int, first: np.ndarray, last: np.ndarray) -> tuple[Ids, Places]:
        """A seat's pages `first` .. `last` ([layers]), and their layers, kv heads and places."""
        width = int(last.max(initial=0))
        pages = np.arange(width)
        wanted = (pages >= first[:, None]) & (pages < last[:, None])
        block = self.tables[kind].host[:, seat, :, :width]
        layer, head, page = np.nonzero(np.broadcast_to(wanted[:, None, :], block.shape))
        return block[layer, head, page], (layer, head, page)

    def at(self, kind: str, seats: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pages [layers, n, kv_heads] and places [layers, n, 1] of slots [layers, n] (wrapped) of
        seats [n]; of any page where the slot is -1."""
        layers = np.arange(self.shape.layers)[:, None, None]
        page, place = np.divmod(np.maximum(slots, 0), self.pool(kind).page_slots)
        host = self.tables[kind].host
        return host[layers, seats[:, None], self._heads, page[:, :, None]], place[:, :, None]

    def _by_seat(
        self, name: Pool, seats: np.ndarray, pages: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pages wanted by seat, and how many of them were promised; [all seats] each."""
        total = np.bincount(seats, pages, minlength=len(self.promised[name])).astype(np.int64)
        return total, np.minimum(total, self.promised[name])

    def _take(self, name: Pool, total: np.ndarray, drawn: np.ndarray) -> Ids:
        ids = self.pools[name].alloc(int(total.sum()), int(drawn.sum()))
        self.promised[name] -= drawn
        return ids

    def _enter(self, growth: Growth, ids: Ids) -> Ids:
        """Write the first of `ids` into the table; answers the rest."""
        row, layer = np.nonzero(growth.need)
        count = growth.need[row, layer]
        row, layer = np.repeat(row, count), np.repeat(layer, count)
        steps = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        page = growth.old[row, layer] + steps
        used = len(row) * self.shape.kv_heads
        table = self.tables[growth.kind]
        entries = ids[:used].reshape(-1, self.shape.kv_heads)
        table.host[layer[:, None], growth.seats[row][:, None], self._heads, page[:, None]] = entries
        table.changed(growth.seats)
        return ids[used:]

    def _own(self, kind: str, seat: int, shared: Ids, at: Places) -> None:
        pool, name = self.pool(kind), KIND_POOL[kind]
        wanted = self._by_seat(name, np.array([seat]), np.array([len(shared)]))
        fresh = self._take(name, *wanted)
        pool.copy(shared, fresh)
        layer, head, page = at
        self.tables[kind].host[layer, seat, head, page] = fresh
        self.tables[kind].changed(np.array([seat]))
        pool.release(shared)
