"""All pages of one kind: who holds which, how many are left, and what their slots stand for."""

from __future__ import annotations

import numpy as np
import torch

from kernels.paged import GROUP, ChannelPages, HighPages, LowPages, Pages
from pask.methods.levels import Level

Ids = np.ndarray
"""Page numbers, [n] int32."""


class OutOfPages(ValueError):
    """A pool has fewer pages left than were asked for, those promised to others left aside."""


class PagePool:
    """`count` pages of `page_slots` tokens each (of one kv head and layer), shared by all seats.

    HIGH pages hold numbers of `dtype`, those of a low level its codes; with `channel_keys` (LOW2
    only, 32 slots) keys are quantised by channel. Free pages are handed out last in, first out, and
    tensors start unwritten, so that an operating system which gives memory on first touch commits
    only the pages that were ever in use. A page may be held several times (`share`); it is free
    again when all have released it.

    `tokens` [count, page_slots] int32 says which token of its sequence a slot stands for. It is
    bookkeeping of the harness (attention never reads it), so it is not among the KV bytes.
    """

    def __init__(
        self,
        level: Level,
        count: int,
        *,
        page_slots: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "cpu",
        channel_keys: bool = False,
    ) -> None:
        if count < 0 or page_slots < 1:
            raise ValueError("a pool needs a page size of at least 1 and no negative page count")
        if channel_keys and level is not Level.LOW2:
            raise ValueError(f"{level.name} keys are not quantised by channel")
        self.name = f"{level.name} by channel" if channel_keys else level.name
        self.count = count
        self.page_slots = page_slots
        with torch.inference_mode(False):  # pages are written in and out of inference mode
            self.pages = _new_pages(level, count, page_slots, head_dim, dtype, device, channel_keys)
        self.tokens = np.zeros((count, page_slots), dtype=np.int32)
        self.references = np.zeros(count, dtype=np.int32)
        self._stack = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._free = count  # the first so many of the stack are free, the last of them is next
        self._reserved = 0

    @property
    def high(self) -> HighPages:
        assert isinstance(self.pages, HighPages)
        return self.pages

    @property
    def low(self) -> LowPages:
        assert isinstance(self.pages, LowPages)
        return self.pages

    @property
    def by_channel(self) -> ChannelPages:
        assert isinstance(self.pages, ChannelPages)
        return self.pages

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the pages consist of; the first dimension is the page."""
        if isinstance(self.pages, HighPages):
            return (self.pages.data,)
        return self.pages.codes, self.pages.ranges

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: codes, scales and zeros where it has them."""
        return sum(part[0].numel() * part.element_size() for part in self.tensors)

    @property
    def slot_bytes(self) -> int:
        return self.page_bytes // self.page_slots

    @property
    def free(self) -> int:
        """Pages that nobody holds, promised or not."""
        return self._free

    @property
    def unpromised(self) -> int:
        """Pages that nobody holds and nobody was promised."""
        return self._free - self._reserved

    @property
    def used(self) -> int:
        return self.count - self._free

    def reserve(self, pages: int) -> None:
        """Promise so many of the free pages to someone; OutOfPages where there are not as many."""
        if pages > self.unpromised:
            raise OutOfPages(self._lack(pages))
        self._reserved += pages

    def unreserve(self, pages: int) -> None:
        """Take back a promise of so many pages."""
        if pages > self._reserved:
            raise ValueError(f"{pages} pages given back of {self._reserved} promised ones")
        self._reserved -= pages

    def require(self, pages: int, promised: int = 0) -> None:
        """OutOfPages unless `alloc` would succeed."""
        if pages - promised > self.unpromised:
            raise OutOfPages(self._lack(pages - promised))

    def alloc(self, pages: int, promised: int = 0) -> Ids:
        """So many pages, held once each; `promised` of them had been reserved.

        OutOfPages, and nothing changed, where the rest is more than the unpromised pages.
        """
        self.require(pages, promised)
        self.unreserve(promised)
        ids = self._stack[self._free - pages : self._free][::-1].copy()
        self._free -= pages
        self.references[ids] = 1
        return ids

    def share(self, ids: Ids) -> None:
        """Hold pages once more; no id twice in one call."""
        self.references[ids] += 1

    def release(self, ids: Ids) -> int:
        """Hold pages once less; no id twice in one call. Answers how many became free."""
        self.references[ids] -= 1
        gone = ids[self.references[ids] == 0]
        self._stack[self._free : self._free + len(gone)] = gone[::-1]
        self._free += len(gone)
        return len(gone)

    def copy(self, source: Ids, target: Ids) -> None:
        """Give the target pages what the source pages hold, tokens included."""
        at, to = (torch.from_numpy(ids.astype(np.int64)) for ids in (source, target))
        for part in self.tensors:
            part[to.to(part.device)] = part[at.to(part.device)]
        self.tokens[target] = self.tokens[source]

    def check(self) -> None:
        """Raise AssertionError where the free list and the references contradict each other."""
        free = self._stack[: self._free]
        assert len(np.unique(free)) == len(free)
        assert bool((self.references[free] == 0).all())
        assert int((self.references > 0).sum()) == self.used
        assert bool((self.references >= 0).all())
        assert 0 <= self._reserved <= self._free

    def _lack(self, pages: int) -> str:
        return (
            f"{pages} pages of {self.name} asked for, {self.unpromised} of {self.count} "
            "are neither held nor promised"
        )


def _new_pages(
    level: Level,
    count: int,
    page_slots: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    channel_keys: bool,
) -> Pages:
    if level is Level.HIGH:
        shape = (count, 2, page_slots, head_dim)
        return HighPages(torch.empty(shape, dtype=dtype, device=device))
    if not level.is_low:
        raise ValueError(f"{level.name} tokens have no pages")
    if head_dim % GROUP:
        raise ValueError(f"head_dim {head_dim} is no multiple of {GROUP}, low levels need that")
    codes = (count, 2, page_slots, head_dim // 8 * level)
    ranges: tuple[int, ...] = (count, 2, page_slots, head_dim // GROUP, 2)
    if channel_keys:
        ranges = (count, 2, head_dim, 2)
    tensors = (
        torch.empty(codes, dtype=torch.uint8, device=device),
        torch.empty(ranges, dtype=torch.float16, device=device),
    )
    return ChannelPages(*tensors) if channel_keys else LowPages(*tensors, int(level))
