"""A synthetic long table with exact counts and byte shares, for the tests of the report."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from pask.report.paper import TEST_SIZES

LABELS = {"full": "Full KV", "snapkv": "SnapKV", "pask": "PASK", "other": "Other & Sons_1"}
FIXED = ("full",)  # without a knob
BYTES = 1000  # Full KV per item: 900 of them prompt


def long_rows(
    method: str,
    right: Mapping[str, int],
    *,
    budget: float,
    reached: float | None = None,
    sizes: Mapping[str, int] = TEST_SIZES,
    model: str = "tiny-model",
    clamped: int = 0,
    rotate: int = 0,
) -> pd.DataFrame:
    """One entry's rows: in each category the first `right[category]` items are right, after a
    rotation by `rotate` items; three neighbours share a cluster. Prompt and decode stage both reach
    `reached` (default: the budget) of Full KV's bytes; methods with a knob read half of what they
    hold, and on development rows reached 1.01 of the budget."""
    share = budget if reached is None else reached
    name = method if method == "full" else f"{method}@{budget:.2f}"
    records = []
    for category, n in sizes.items():
        for i in range(n):
            correct = int((i + rotate) % n < right[category])
            records.append(
                {
                    "model": model,
                    "split": "paper/test",
                    "method": method,
                    "label": LABELS[method],
                    "budget": budget,
                    "nominal": float("nan") if method in FIXED else budget,
                    "b_development": float("nan") if method in FIXED else 1.01 * budget,
                    "entry": name,
                    "id": f"{category}_{i}",
                    "category": category,
                    "cluster": f"{category}-{i // 3}",
                    "correct": correct,
                    "error_type": "" if correct else ("wrong_count", "malformed")[i % 2],
                    "finish": "stop",
                    "prompt_tokens": 90,
                    "new_tokens": 10,
                    "resident_prompt_bytes": round(900 * share),
                    "resident_decode_bytes": round(100 * share),
                    "full_prompt_bytes": 900,
                    "full_bytes": BYTES,
                    "resident_byte_steps": round(9500 * share),
                    "read_byte_steps": 9500 if method in FIXED else round(9500 * share / 2),
                    "full_byte_steps": 9500,
                    "notes": "unreachable window" if i < clamped else "",
                }
            )
    return pd.DataFrame(records)


def paper_counts(paper: pd.DataFrame, method: str, model: str = "Qwen3-4B") -> dict[str, int]:
    """The paper's counts by category, to build rows that reproduce its table."""
    rows = paper[(paper["model"] == model) & (paper["method"] == method)]
    return dict(zip(rows["category"], rows["k"], strict=True))
