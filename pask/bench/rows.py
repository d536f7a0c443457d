"""Which rows a benchmark measures on."""

from __future__ import annotations

from pask.bfcl.data import Row, load_rows
from pask.bfcl.splits import build_splits
from pask.config import RunConfig
from pask.errors import PaskError


def picked_rows(config: RunConfig, items: int, at_least: int = 1) -> list[Row]:
    """`items` rows of the run's part, taking turns among the categories, in the split's order.

    PaskError for fewer than `at_least` and for more than there are.
    """
    rows = load_rows()
    splits = build_splits(rows, config.data.split, config.data.seed)
    groups = list(splits.sample(config.data.part, config.data.sample).values())
    longest = max(len(group) for group in groups)
    turns = [group[i] for i in range(longest) for group in groups if i < len(group)]
    if not at_least <= items <= len(turns):
        raise PaskError(f"--items must be {at_least} to {len(turns)}, not {items}")
    return [rows[row_id] for row_id in turns[:items]]
