"""A policy's cost of a level is what the store's pages take for it."""

from __future__ import annotations

import pytest

from kernels.paged import GROUP
from pask.engine.pages import PagePool
from pask.methods.levels import Level
from pask.policy.actions import CHANNELS, level_cost


@pytest.mark.parametrize("level", [level for level in Level if level is not Level.RELEASE])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_a_levels_cost_is_its_share_of_the_stores_bytes(level: Level, head_dim: int) -> None:
    assert CHANNELS == GROUP
    pool = PagePool(level, 3, page_slots=16, head_dim=head_dim)
    taken = sum(t.numel() * t.element_size() for t in pool.tensors) / (3 * 16)
    assert taken == level_cost(level) * 2 * head_dim * 2  # key and value, two bytes a number
