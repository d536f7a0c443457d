"""Inputs for the kernel operations, and what they must answer by the plainest of computations.

Nothing here comes from the operations themselves: codes are read bit by bit as the page format
says, sums run over single slots in float64. A case can be moved to another device as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch

from kernels.paged import ChannelPages, HighPages, KeyShift, LowPages, Pages, Region

BODIES = {"reference": "kernels.reference", "cpu": "kernels.cpu", "triton": "kernels.triton"}
"""Every body of the operations by the name of its module."""

KINDS: dict[str, torch.dtype | int | None] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "low2": 2,
    "low3": 3,
    "low4": 4,
    "low8": 8,
    "channel2": None,
}
"""Kinds of pages: a dtype, a code width, or None for `ChannelPages`."""


def load_body(name: str) -> ModuleType:
    """The module with a body's operations; skips the test where it cannot be had."""
    if name == "cpu":
        from kernels.cpu import build, library

        try:
            library.loaded()
        except build.Unavailable as reason:
            pytest.skip(f"no native kernels: {reason}")
    try:
        return import_module(BODIES[name])
    except ImportError as reason:
        pytest.skip(f"no {name} kernels: {reason}")


@dataclass(frozen=True)
class RegionSpec:
    """One region of a case: its kind of pages, and `counts[r]` slots that row r may see from
    `first[r]` on. Kv head h sees h slots fewer where there are as many. `ring`: its capacity."""

    kind: str
    counts: Sequence[int]
    first: Sequence[int] | None = None
    ring: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """What an attention case is made from; `sequences[r]` is row r's sequence."""

    regions: Sequence[RegionSpec]
    sequences: Sequence[int] = (0,)
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page_slots: int = 16
    shift: bool = False
    picks: int = 0
    seed: int = 0


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of `paged_attention`."""

    q: torch.Tensor
    sequence: torch.Tensor
    regions: list[Region]
    shift: KeyShift | None
    chosen: torch.Tensor | None

    def rows(self, rows: Sequence[int]) -> AttentionCase:
        """Only these rows, in this order, over the same pages."""
        at = torch.tensor(list(rows), dtype=torch.long, device=self.q.device)
        regions = [
            replace(
                region,
                stop=region.stop[at],
                start=None if region.start is None else region.start[at],
            )
            for region in self.regions
        ]
        chosen = None if self.chosen is None else self.chosen[at]
        return AttentionCase(self.q[at], self.sequence[at], regions, self.shift, chosen)

    def to(self, device: str) -> AttentionCase:
        """The same case on a device."""

        def moved(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        regions = [
            Region(
                pages_to(region.pages, device),
                region.table.to(device),
                region.stop.to(device),
                moved(region.start),
                moved(region.ring),
            )
            for region in self.regions
        ]
        shift = self.shift and KeyShift(self.shift.center.to(device), self.shift.spread.to(device))
        return AttentionCase(
            self.q.to(device), self.sequence.to(device), regions, shift, moved(self.chosen)
        )

    def run(self, body: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
        """The body's answer, probabilities included, on the CPU."""
        out, weights = body.paged_attention(
            self.q,
            self.sequence,
            self.regions,
            self.shift,
            chosen=self.chosen,
            probabilities=True,
        )
        return out.cpu(), weights.cpu()


def pages_to(pages: Pages, device: str) -> Pages:
    if isinstance(pages, HighPages):
        return HighPages(pages.data.to(device))
    codes, ranges = pages.codes.to(device), pages.ranges.to(device)
    if isinstance(pages, ChannelPages):
        return ChannelPages(codes, ranges)
    return LowPages(codes, ranges, pages.bits)


def random_pages(kind: str, pages: int, page_slots: int, head_dim: int, seed: int = 0) -> Pages:
    """Pages with something in every slot."""
    maker = torch.Generator().manual_seed(seed)
    stored = KINDS[kind]
    if isinstance(stored, torch.dtype):
        return HighPages(torch.randn(pages, 2, page_slots, head_dim, generator=maker).to(stored))
    bits = stored or 2
    shape = (pages, 2, page_slots, head_dim // 8 * bits)
    codes = torch.randint(0, 256, shape, generator=maker, dtype=torch.uint8)
    ranges = torch.rand(pages, 2, page_slots * (head_dim // 32), 2, generator=maker)
    ranges[..., 0] = (ranges[..., 0] + 0.5) * 4 / (1 << bits)
    ranges[..., 1] -= 2.5
    if stored is None:
        return ChannelPages(codes, ranges.half())
    return LowPages(codes, ranges.half().view(*shape[:3], head_dim // 32, 2), stored)


def random_table(sequences: int, kv_heads: int, table_pages: int, seed: int = 0) -> torch.Tensor:
    """A table in which every page belongs to one place, in no order."""
    maker = torch.Generator().manual_seed(seed)
    order = torch.randperm(sequences * kv_heads * table_pages, generator=maker)
    return order.view(sequences, kv_heads, table_pages).to(torch.int32)


def attention_case(spec: AttentionSpec) -> AttentionCase:
    """The case of a spec; what no row may see is NaN or out of range, so that reading it shows."""
    maker = torch.Generator().manual_seed(spec.seed)
    rows, sequences = len(spec.sequences), max(spec.sequences) + 1
    regions = []
    for number, made in enumerate(spec.regions):
        start = torch.tensor(made.first or [0] * rows, dtype=torch.int32)[:, None]
        start = start.repeat(1, spec.kv_heads)
        less = torch.arange(spec.kv_heads, dtype=torch.int32)
        count = (torch.tensor(made.counts, dtype=torch.int32)[:, None] - less).clamp(min=0)
        stop = start + torch.where(torch.tensor(made.counts)[:, None] > 0, count.clamp(min=1), 0)
        stop = stop.to(torch.int32)
        most = made.ring or max(int(stop.max()), 1)
        page_slots = 32 if made.kind == "channel2" else spec.page_slots
        table_pages = -(-most // page_slots)
        seed = spec.seed + 10 * number
        pages = random_pages(
            made.kind,
            sequences * spec.kv_heads * table_pages,
            page_slots,
            spec.head_dim,
            seed + 1,
        )
        table = random_table(sequences, spec.kv_heads, table_pages, seed + 2)
        ring = torch.full((sequences,), made.ring, dtype=torch.int32) if made.ring else None
        region = Region(pages, table, stop, start if made.first else None, ring)
        if not spec.picks or number:
            _spoil_unseen(region, spec.sequences)
        regions.append(region)
    shift = chosen = None
    if spec.shift:
        shape = (sequences, spec.kv_heads, spec.head_dim)
        center = torch.randn(shape, generator=maker).half()
        shift = KeyShift(center, (torch.rand(shape, generator=maker) + 0.5).half())
    if spec.picks:
        chosen = torch.full((rows, spec.kv_heads, spec.picks), -1, dtype=torch.int32)
        for row in range(rows):
            for head in range(spec.kv_heads):
                stop_here = int(regions[0].stop[row, head])
                many = max(0, min(spec.picks, stop_here) - row)
                found = torch.randperm(stop_here, generator=maker)[:many].sort().values
                chosen[row, head, :many] = found.to(torch.int32)
    q = torch.randn(rows, spec.kv_heads, spec.group, spec.head_dim, generator=maker)
    sequence = torch.tensor(spec.sequences, dtype=torch.int32)
    return AttentionCase(q, sequence, regions, shift, chosen)


def _spoil_unseen(region: Region, sequences: Sequence[int]) -> None:
    """NaN into every slot of the pool that no row sees (a quantised slot's range); into keys that
    have their range by channel where a whole page is unseen."""
    pages = region.pages
    data = pages.data if isinstance(pages, HighPages) else pages.ranges
    seen = torch.zeros(data.shape[0], pages.page_slots, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        for head in range(region.stop.shape[1]):
            for slot in visible_slots(region, row, head):
                page, place = find(region, sequence, head, slot)
                seen[page, place] = True
    if isinstance(pages, ChannelPages):
        data[~seen.any(1), 0] = float("nan")
        data[:, 1].view(*seen.shape, -1)[~seen] = float("nan")
        return
    for half in (0, 1):
        data[:, half][~seen] = float("nan")


def visible_slots(region: Region, row: int, head: int) -> range:
    start = 0 if region.start is None else int(region.start[row, head])
    return range(start, int(region.stop[row, head]))


def find(region: Region, sequence: int, head: int, slot: int) -> tuple[int, int]:
    """Page and place of a slot."""
    ring = 0 if region.ring is None else int(region.ring[sequence])
    slot = slot % ring if ring else slot
    page_slots = region.pages.page_slots
    return int(region.table[sequence, head, slot // page_slots]), slot % page_slots


def read_codes(packed: np.ndarray, bits: int, head_dim: int) -> np.ndarray:
    """The codes of packed bytes [..., head_dim // 8 * bits], channel by channel as documented."""
    codes = np.zeros((*packed.shape[:-1], head_dim), dtype=np.int64)
    for channel in range(head_dim):
        group, inside = divmod(channel, 32)
        base, word, place = group * 4 * bits, inside % 8, inside // 8
        width = 2 if bits == 3 else bits
        first = word * 4 * width + place * width  # bits into the group
        value = packed[..., base + first // 8].astype(np.int64) >> (first % 8)
        codes[..., channel] = value & ((1 << width) - 1)
        if bits == 3:
            high = packed[..., base + 8 + inside // 8].astype(np.int64) >> (inside % 8)
            codes[..., channel] |= (high & 1) << 2
    return codes


def stored_values(pages: Pages) -> np.ndarray:
    """[pages, 2, page_slots, head_dim] float64, what the pages hold."""
    if isinstance(pages, HighPages):
        return pages.data.double().numpy()
    head_dim = pages.codes.shape[-1] * 8 // pages.bits
    codes = read_codes(pages.codes.numpy(), pages.bits, head_dim)
    ranges = pages.ranges.double().numpy()
    if isinstance(pages, ChannelPages):
        by_channel = np.broadcast_to(ranges[:, 0, None], (*codes[:, 0].shape, 2))
        by_token = ranges[:, 1].reshape(-1, 32, head_dim // 32, 2)
        ranges = np.stack((by_channel, np.repeat(by_token, 32, axis=-2)), axis=1)
    else:
        ranges = np.repeat(ranges, 32, axis=-2)
    return codes * ranges[..., 0] + ranges[..., 1]


@dataclass
class Expected:
    """Attention's answer in float64; `weights[r][h][g]` has as many entries as slots are seen."""

    out: np.ndarray
    weights: list[list[list[np.ndarray]]] = field(default_factory=list)


def naive_attention(case: AttentionCase) -> Expected:
    """One row, head, query and slot at a time."""
    q = case.q.double().numpy()
    held = [stored_values(region.pages) for region in case.regions]
    expected = Expected(np.zeros(q.shape))
    for row in range(q.shape[0]):
        owner = int(case.sequence[row])
        expected.weights.append([])
        for head in range(q.shape[1]):
            keys, values = [], []
            for number, (region, data) in enumerate(zip(case.regions, held, strict=True)):
                slots = list(visible_slots(region, row, head))
                if number == 0 and case.chosen is not None:
                    slots = [slot for slot in case.chosen[row, head].tolist() if slot >= 0]
                for slot in slots:
                    page, place = find(region, owner, head, slot)
                    key = data[page, 0, place]
                    if case.shift is not None and isinstance(region.pages, LowPages):
                        spread = case.shift.spread[owner, head].double().numpy()
                        key = key * spread + case.shift.center[owner, head].double().numpy()
                    keys.append(key)
                    values.append(data[page, 1, place])
            expected.weights[-1].append([])
            for member in range(q.shape[2]):
                scores = np.array(keys) @ q[row, head, member] / np.sqrt(q.shape[3])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                expected.out[row, head, member] = weights @ np.array(values)
                expected.weights[-1][-1].append(weights)
    return expected


def check_attention(case: AttentionCase, expected: Expected, body: ModuleType) -> None:
    """The body's answer to the case, against the naive one."""
    out, weights = case.run(body)
    assert out.dtype == weights.dtype == torch.float32
    scale = max(1.0, float(np.abs(expected.out).max()))
    np.testing.assert_allclose(out.double().numpy(), expected.out, rtol=0, atol=2e-5 * scale)
    widths = [len(of_head[0]) for of_row in expected.weights for of_head in of_row]
    assert weights.shape == (*case.q.shape[:3], max(widths))
    for row, of_row in enumerate(expected.weights):
        for head, of_head in enumerate(of_row):
            for member, wanted in enumerate(of_head):
                got = weights[row, head, member].double().numpy()
                np.testing.assert_allclose(got[: len(wanted)], wanted, rtol=1e-4, atol=1e-7)
                assert not got[len(wanted) :].any()


HIGH_LOW = (
    RegionSpec("fp16", (37,)),
    RegionSpec("fp16", (5,), first=(30,), ring=32),
    RegionSpec("low4", (61,)),
)

ATTENTION = {
    **{f"{kind} only": AttentionSpec((RegionSpec(kind, (75,)),)) for kind in KINDS},
    **{
        f"head_dim {dim}, group {group}": AttentionSpec(HIGH_LOW, head_dim=dim, group=group)
        for dim, group in ((32, 1), (64, 4), (96, 7), (128, 2), (64, 8), (32, 5), (128, 6))
    },
    "head_dim 80, no low region": AttentionSpec((RegionSpec("bf16", (33,)),), head_dim=80),
    "one slot": AttentionSpec((RegionSpec("fp16", (1,)),), kv_heads=1),
    "empty regions beside one low slot": AttentionSpec(
        (
            RegionSpec("fp16", (0,)),
            RegionSpec("fp16", (0,), first=(19,), ring=16),
            RegionSpec("low3", (1,)),
        ),
        kv_heads=1,
    ),
    "shifted keys": AttentionSpec(
        (RegionSpec("fp16", (20,)), RegionSpec("low4", (50,)), RegionSpec("low2", (9,))),
        shift=True,
    ),
    "every width at once": AttentionSpec(
        tuple(
            RegionSpec(kind, (n,))
            for kind, n in zip(KINDS, (3, 9, 0, 40, 17, 33, 64, 96), strict=True)
            if kind not in ("bf16", "fp32")
        ),
        shift=True,
        group=7,
    ),
    "a run of rows whose window moves on": AttentionSpec(
        (
            RegionSpec("fp16", (12, 12, 13, 13, 14)),
            RegionSpec("fp16", (9, 9, 9, 9, 9), first=(12, 13, 14, 15, 16), ring=24),
            RegionSpec("low4", (31, 32, 33, 34, 35)),
        ),
        sequences=(0,) * 5,
        page_slots=8,
        shift=True,
    ),
    "runs and single rows of several sequences": AttentionSpec(
        (
            RegionSpec("fp16", (40, 41, 3, 70, 71, 72, 0)),
            RegionSpec("low4", (0, 0, 33, 64, 64, 65, 12)),
        ),
        sequences=(2, 2, 0, 3, 3, 3, 1),
        group=4,
        shift=True,
    ),
    "odd pages": AttentionSpec(
        (RegionSpec("fp16", (23, 24)), RegionSpec("low8", (14, 15))), sequences=(0, 0), page_slots=5
    ),
    "a ring that ends inside a page": AttentionSpec(
        (RegionSpec("fp16", (19, 18), first=(30, 31), ring=20),), sequences=(0, 0)
    ),
    **{
        f"groups of tokens, head_dim {dim}, group {group}": AttentionSpec(
            (
                RegionSpec("fp16", (21,)),
                RegionSpec("channel2", (96,)),
                RegionSpec("low4", (33,)),
            ),
            head_dim=dim,
            group=group,
            kv_heads=1,
            shift=group == 4,
        )
        for dim, group in ((32, 1), (64, 2), (96, 4), (128, 7))
    },
    "groups of tokens, seen in part by a run": AttentionSpec(
        (
            RegionSpec("channel2", (160, 70, 64, 32, 1), first=(0, 40, 32, 63, 95)),
            RegionSpec("fp16", (3, 4, 5, 6, 7)),
        ),
        sequences=(1, 1, 1, 1, 0),
    ),
    "slots chosen in groups of tokens": AttentionSpec(
        (RegionSpec("channel2", (90,)), RegionSpec("fp16", (5,))), picks=20
    ),
    "chosen slots": AttentionSpec(
        (RegionSpec("fp16", (90, 91, 40)), RegionSpec("low4", (5, 6, 7))),
        sequences=(1, 1, 0),
        picks=44,
    ),
}
"""Attention cases by name."""
