"""Page pools: who holds a page, who was promised one, and what a page takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pask.engine.pages import OutOfPages, PagePool
from pask.methods.levels import Level


def pool(count: int = 6, level: Level = Level.HIGH) -> PagePool:
    return PagePool(level, count, page_slots=4, head_dim=32)


def test_the_page_given_back_last_is_given_out_first() -> None:
    pages = pool()
    first = pages.alloc(3)
    assert first.tolist() == [0, 1, 2]
    pages.release(first[1:2])
    assert pages.alloc(2).tolist() == [1, 3]
    pages.check()


def test_a_shared_page_is_free_when_all_have_released_it() -> None:
    pages = pool()
    ids = pages.alloc(2)
    pages.share(ids)
    assert pages.release(ids) == 0
    assert pages.free == 4
    assert pages.release(ids[:1]) == 1
    assert pages.free == 5
    pages.check()


def test_promised_pages_are_kept_from_others() -> None:
    pages = pool()
    pages.reserve(4)
    pages.alloc(2)
    with pytest.raises(OutOfPages, match="1 pages of HIGH asked for, 0 of 6"):
        pages.alloc(1)
    pages.check()
    assert len(pages.alloc(3, promised=3)) == 3
    assert (pages.free, pages.unpromised) == (1, 0)
    pages.unreserve(1)
    assert len(pages.alloc(1)) == 1
    pages.check()


def test_a_promise_needs_free_pages() -> None:
    pages = pool()
    pages.alloc(3)
    with pytest.raises(OutOfPages):
        pages.reserve(4)
    with pytest.raises(ValueError, match="given back"):
        pages.unreserve(1)
    pages.check()


def test_a_copy_has_the_numbers_and_the_tokens() -> None:
    pages = pool(level=Level.LOW4)
    one, two = pages.alloc(1), pages.alloc(1)
    pages.low.codes[one] = 7
    pages.low.ranges[one] = 0.5
    pages.tokens[one] = np.arange(4)
    pages.copy(one, two)
    assert bool((pages.low.codes[two] == 7).all())
    assert bool((pages.low.ranges[two] == 0.5).all())
    assert pages.tokens[two].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("level", "bits_a_number"),
    [(Level.HIGH, 16), (Level.LOW8, 9), (Level.LOW4, 5), (Level.LOW3, 4), (Level.LOW2, 3)],
)
def test_bytes_of_a_page(level: Level, bits_a_number: int) -> None:
    # Key and value, 4 slots, 32 channels; a group of 32 adds scale and zero, a bit per channel.
    assert pool(level=level).page_bytes == 2 * 4 * 32 * bits_a_number // 8


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_bytes_of_a_page_of_32_tokens_by_channel(head_dim: int) -> None:
    groups = PagePool(Level.LOW2, 1, page_slots=32, head_dim=head_dim, channel_keys=True)
    keys = 32 * head_dim // 4 + head_dim * 4
    values = 32 * head_dim // 4 + 32 * (head_dim // 32) * 4
    assert groups.page_bytes == keys + values
    with pytest.raises(ValueError, match="LOW4 keys are not quantised by channel"):
        PagePool(Level.LOW4, 1, page_slots=32, head_dim=head_dim, channel_keys=True)
    with pytest.raises(ValueError, match="hold 32 tokens"):
        PagePool(Level.LOW2, 1, page_slots=16, head_dim=head_dim, channel_keys=True)


def test_wide_numbers_make_wide_pages() -> None:
    wide = PagePool(Level.HIGH, 1, page_slots=2, head_dim=8, dtype=torch.float32)
    assert wide.page_bytes == 2 * 2 * 8 * 4


def test_low_levels_need_groups_of_32_channels() -> None:
    with pytest.raises(ValueError, match="no multiple of 32"):
        PagePool(Level.LOW4, 1, page_slots=4, head_dim=48)
    with pytest.raises(ValueError, match="RELEASE tokens have no pages"):
        PagePool(Level.RELEASE, 1, page_slots=4, head_dim=32)


def test_check_finds_a_page_that_is_free_and_held() -> None:
    pages = pool()
    pages.alloc(2)
    pages.references[0] = 0
    with pytest.raises(AssertionError):
        pages.check()
