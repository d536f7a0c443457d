"""The store seen from outside: its invariants, and what a seat holds as plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.paged import HighPages
from kernels.reference.attention import read_pages
from pask.engine.kv_bytes import count_bytes
from pask.engine.kv_seat import CHANNEL2, KIND_POOL, Seat
from pask.methods.levels import Level

if TYPE_CHECKING:
    from pask.engine.kv_holdings import Holdings

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def dense(store: Holdings, seat: Seat, layer: int) -> dict[str, Tokens]:
    """What a seat holds in a layer, by kind of region, in slot order.

    (tokens [kv_heads, n] int64, keys, values [kv_heads, n, head_dim]); 16-bit regions as they are
    stored, low ones in fp32 with the keys' statistics put back. A summary's are the chunks' numbers
    and their (min, max).
    """
    found = {}
    for kind in store.held(seat):
        slots = _live(store, seat, kind, layer)
        if not len(slots):
            continue
        pool = store.pool(kind)
        page, place = np.divmod(slots, pool.page_slots)
        ids = store.seat_pages.tables[kind].host[layer, seat.id][:, page].astype(np.int64)
        tokens = pool.tokens[ids, place]
        if kind == "summary":
            tokens = np.broadcast_to(slots, tokens.shape).copy()
        at = torch.from_numpy(ids).to(store.device), torch.from_numpy(place).to(store.device)
        keys, values = _read(store, kind, *at)
        if KIND_POOL[kind] not in (Level.HIGH, CHANNEL2) and seat.has_statistics:
            shift = store.statistics.shift(layer)
            keys = keys * shift.spread[seat.id].float()[:, None]
            keys = keys + shift.center[seat.id].float()[:, None]
        found[kind] = (torch.from_numpy(tokens.astype(np.int64)), keys, values)
    return found


def check(store: Holdings) -> None:
    """Raise AssertionError where an invariant is broken (between two steps)."""
    holders = {name: np.zeros(pool.count, int) for name, pool in store.seat_pages.pools.items()}
    for seat in filter(None, store.seats):
        _check_counts(store, seat)
        for kind, pages in store.held(seat).items():
            ids, _ = store.seat_pages.ids(kind, seat.id, np.zeros_like(pages), pages)
            assert len(np.unique(ids)) == len(ids), "a seat names a page twice"
            np.add.at(holders[KIND_POOL[kind]], ids, 1)
            if not seat.shares:
                assert (store.pool(kind).references[ids] == 1).all()
        for layer in range(seat.layers_placed):
            _check_layer(store, seat, layer)
        stages = count_bytes(store, seat)
        assert all(count > 0 for kinds in stages.values() for count in kinds.values())
    for name, pool in store.seat_pages.pools.items():
        pool.check()
        assert (pool.references == holders[name]).all(), "references are not the tables' entries"
        promised = store.seat_pages.promised[name]
        assert (promised >= 0).all()
        assert int(promised.sum()) == pool.free - pool.unpromised
        assert store.pool_bytes()[name] == (
            int((holders[name] > 0).sum()) * pool.page_bytes,
            sum(part.numel() * part.element_size() for part in pool.tensors),
        )


def _check_counts(store: Holdings, seat: Seat) -> None:
    assert 0 <= seat.cut_from <= seat.decoded
    if seat.acts:
        waiting = store.trails.waiting[seat.id, : seat.decoded + 1]
        assert (waiting[0] == 0).all()
        assert np.isin(np.diff(waiting, axis=0), (0, 1)).all()
        assert (store.ring_written[seat.id] >= waiting[-1]).all()
    assert seat.position <= store.max_tokens
    assert seat.ring_slots % store.page_slots == 0
    assert seat.ring_slots == store.rings[seat.id]
    assert seat.shares or seat.owns_tails
    of_prompt, high = store.prompt_high[seat.id], store.counts["high"][seat.id]
    assert ((of_prompt >= 0) & (of_prompt <= high * store.shape.kv_heads)).all()


def _check_layer(store: Holdings, seat: Seat, layer: int) -> None:
    seen: list[torch.Tensor] = []
    for kind, (tokens, keys, values) in dense(store, seat, layer).items():
        if kind == "summary":
            assert bool((keys <= values).all())
            continue
        assert bool(torch.isfinite(keys).all() and torch.isfinite(values).all())
        assert int(tokens.min()) >= 0
        assert int(tokens.max()) < seat.position
        seen.append(tokens)
        of_prompt = int((tokens < seat.prompt_tokens).sum())
        if kind == "high":
            assert of_prompt == store.prompt_high[seat.id, layer]
        elif kind == "recent":
            assert of_prompt == 0
            assert tokens.shape[1] <= min(seat.recent + 1, seat.ring_slots)
        else:
            low = store.prompt_low[kind][seat.id, layer]
            assert of_prompt == low * store.shape.kv_heads
            assert kind != CHANNEL2 or of_prompt == tokens.numel()
    if seen:
        together = torch.cat(seen, dim=1).sort(dim=1).values
        assert bool((together[:, 1:] > together[:, :-1]).all()), "a token lies in two regions"


def _live(store: Holdings, seat: Seat, kind: str, layer: int) -> np.ndarray:
    """The slots in use, wrapped where the kind is a ring."""
    if kind == "recent":
        waiting = store.trails.waiting[seat.id, :, layer]
        first, last = waiting[seat.left], waiting[seat.decoded]
        return np.arange(first, last) % seat.ring_slots
    if kind == "summary":
        assert seat.choice is not None
        return np.arange(-(-store.counts["high"][seat.id, layer] // seat.choice.chunk))
    return np.arange(store.counts[kind][seat.id, layer])


def _read(
    store: Holdings, kind: str, page: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    pages = store.pool(kind).pages
    if isinstance(pages, HighPages):  # as stored, not in fp32
        return pages.data[page, 0, place], pages.data[page, 1, place]
    return read_pages(pages, page, place.expand_as(page))
