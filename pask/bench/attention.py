"""Decode attention over a budget of KV: the native kernels against torch's SDPA over all of it.

One query token of a sequence of 8,192 tokens, in the shape of the run's model, on one thread. Ours
reads a store at B = 0.33: 1,638 tokens in 16 bits and 3,407 in 4-bit codes, in pages that lie in no
order, and has let go of the rest. Theirs reads every token in fp32, contiguous, which is the best
case of a dense cache. A model reads another layer's KV at every call, so both sides take turns over
several layers' worth of it: what a cache holds of the last call helps neither.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

import kernels
from kernels.paged import GROUP, HighPages, KeyShift, LowPages, Region
from pask.bench import Measured
from pask.config import RunConfig
from pask.engine.layout import ModelLayout, read_layout
from pask.engine.loading import model_folder
from pask.errors import PaskError
from pask.paths import cache_dir

TOKENS = 8192
HIGH_TOKENS = TOKENS // 5
LOW_TOKENS = TOKENS * 416 // 1000  # takes 80 bytes where 16 bits take 256: B = 0.33
LAYERS = 8
PAGE_SLOTS = 16
BITS = 4


@dataclass(frozen=True)
class _Side:
    """One thing to time: a call for each layer, the bytes and tokens that one call reads."""

    name: str
    calls: Sequence[Callable[[], object]]
    bytes: int
    tokens: int


def measure(config: RunConfig, items: int) -> Measured:
    """Microseconds a call, the median of `items` rounds over all layers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _measure(_layout(config), items)
    finally:
        torch.set_num_threads(threads)


def _layout(config: RunConfig) -> ModelLayout:
    model = config.model
    source = model.path or model.source
    folder, _, _ = model_folder(source, model.revision, cache_dir(), model.sha256)
    return read_layout(folder)


def _measure(layout: ModelLayout, items: int) -> Measured:
    if layout.head_dim % GROUP:
        raise PaskError(f"head_dim {layout.head_dim} cannot be quantised in groups of {GROUP}")
    torch.manual_seed(0)
    sides = (
        _paged("ours", layout, HIGH_TOKENS, LOW_TOKENS),
        _dense(layout),
        _paged("16-bit slots alone", layout, TOKENS // 2, 0),
        _paged("4-bit slots alone", layout, 0, TOKENS // 2),
    )
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(items + 1):  # the first is what only the first call pays
        for side, seconds in zip(sides, times, strict=True):
            start = time.perf_counter()
            for call in side.calls:
                call()
            if turn:
                seconds.append((time.perf_counter() - start) / LAYERS)
    print(
        f"{layout.kv_heads} kv heads of {layout.group_size} queries, head_dim {layout.head_dim}; "
        f"{LAYERS} layers in turn; kernels: {' '.join(kernels.body())}",
        file=sys.stderr,
    )
    medians = [statistics.median(seconds) for seconds in times]
    for side, median in zip(sides, medians, strict=True):
        print(
            f"  {side.name:20}{1e6 * median:9.1f} us a call{side.tokens / median / 1e6:9.1f} M "
            f"tokens/s{side.bytes / median / 1e9:8.1f} GB/s"
            f"{1e9 * median / side.tokens / layout.kv_heads:8.1f} ns a token and kv head",
            file=sys.stderr,
        )
    share = sides[0].bytes / (sides[1].bytes / 2)
    print(f"  bytes that ours reads, of a full 16-bit store: {share:.3f}", file=sys.stderr)
    unit = "microseconds a call: paged attention at B = 0.33 against torch SDPA over all, fp32"
    return Measured(1e6 * medians[0], 1e6 * medians[1], unit, items, less_is_better=True)


def _paged(name: str, layout: ModelLayout, high: int, low: int) -> _Side:
    sequence = torch.zeros(1, dtype=torch.int32)
    shape = (1, layout.kv_heads, layout.head_dim)
    shift = KeyShift(torch.randn(shape).half(), (torch.rand(shape) + 0.5).half())
    q = torch.randn(1, layout.kv_heads, layout.group_size, layout.head_dim)
    regions = [_regions(layout, high, low) for _ in range(LAYERS)]
    size = sum(
        tokens * _slot_bytes(layout, bits) for tokens, bits in ((high, 16), (low, BITS)) if tokens
    )
    return _Side(
        name,
        [partial(kernels.paged_attention, q, sequence, layer, shift) for layer in regions],
        size,
        high + low,
    )


def _slot_bytes(layout: ModelLayout, bits: int) -> int:
    """Bytes of a token's keys and values, with the scales and zeros of codes."""
    ranges = 0 if bits == 16 else layout.head_dim // GROUP * 4
    return 2 * layout.kv_heads * (layout.head_dim * bits // 8 + ranges)


def _regions(layout: ModelLayout, high: int, low: int) -> list[Region]:
    head_dim, found = layout.head_dim, []
    if high:
        table = _table(layout, high)
        pages = torch.randn(table.numel(), 2, PAGE_SLOTS, head_dim, dtype=torch.float32).half()
        found.append(Region(HighPages(pages), table, _count(layout, high)))
    if low:
        table = _table(layout, low)
        shape = (table.numel(), 2, PAGE_SLOTS)
        codes = torch.randint(0, 256, (*shape, head_dim // 8 * BITS), dtype=torch.uint8)
        ranges = (torch.rand(*shape, head_dim // GROUP, 2) / 4).half()
        found.append(Region(LowPages(codes, ranges, BITS), table, _count(layout, low)))
    return found


def _table(layout: ModelLayout, tokens: int) -> torch.Tensor:
    pages = -(-tokens // PAGE_SLOTS)
    order = torch.randperm(layout.kv_heads * pages, dtype=torch.int32)
    return order.view(1, layout.kv_heads, pages)


def _count(layout: ModelLayout, tokens: int) -> torch.Tensor:
    return torch.full((1, layout.kv_heads), tokens, dtype=torch.int32)


def _dense(layout: ModelLayout) -> _Side:
    q = torch.randn(1, layout.q_heads, 1, layout.head_dim)
    shape = (2, 1, layout.kv_heads, TOKENS, layout.head_dim)
    layers = [torch.randn(shape) for _ in range(LAYERS)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return _Side(
        "SDPA, all in fp32",
        [partial(attend, q, kv[0], kv[1], enable_gqa=True) for kv in layers],
        layers[0].numel() * 4,
        TOKENS,
    )
