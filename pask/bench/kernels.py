"""The GPU kernels: what each takes, and how much of the memory's bandwidth it makes use of.

Shapes are those of the run's model, whose weights are not needed; 8 sequences are a batch.
Attention at B = 1 (all tokens in 16 bit) and B = 0.33 stands beside torch's own attention over the
whole KV in fp16. Bandwidth is measured too, by a large copy on the device. Calls are captured once
and replayed, so that times are the device's; what a call costs the host is printed apart. Several
layers' KV is read in turn: one alone would stay in the cache, which no model's KV does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from kernels.bodies import operations
from kernels.paged import GROUP, HighPages, KeyShift, LowPages, Pages, Region
from pask.bench import Measured
from pask.config import RunConfig
from pask.engine.layout import ModelLayout, read_layout
from pask.engine.loading import model_folder
from pask.errors import PaskError
from pask.paths import cache_dir

SEQUENCES = 8
LENGTHS = (8192, 32768)
PAGE_SLOTS = 16
LAYERS = 4
COPIED_BYTES = 1 << 30
ROUNDS = 8
"""Times that a graph holds all calls of a line: starting a graph takes as long as a small call."""
HIGH_SHARE, LOW_SHARE = 0.2, 0.416
"""Tokens in 16 bit and in 4 (5 with their scales): 0.2 + 0.416 * 5 / 16 = 0.33 of the bytes."""

Call = Callable[[], object]


@dataclass(frozen=True)
class _Line:
    """One operation: calls over different data, and the bytes that one has to move."""

    name: str
    calls: Sequence[Call]
    bytes: float

    def print(self, microseconds: float, peak: float) -> None:
        rate = self.bytes / microseconds / 1e3  # GB/s
        print(
            f"{self.name:44s} {microseconds:10.1f} us {rate:7.0f} GB/s {rate / peak:6.1%}",
            file=sys.stderr,
        )


def measure(config: RunConfig, items: int, device: str = "cuda") -> Measured:
    """Microseconds of attention at the largest length and B = 0.33; theirs attends over all.

    `items` repetitions of every line. PaskError where there is no CUDA device or no Triton, or
    where the model's head_dim cannot be quantised.
    """
    _check_device(device)
    kernels = operations("cuda")
    if kernels.__name__ != "kernels.triton":
        raise PaskError(
            "no Triton kernels",
            where="bench kernels",
            todo="install triton, and leave PASK_KERNELS unset",
        )
    layout = _layout(config)
    print(
        f"{torch.cuda.get_device_name(device)}: {layout.kv_heads} kv heads of {layout.head_dim}, "
        f"query group {layout.group_size}, batch {SEQUENCES}",
        file=sys.stderr,
    )
    ours = theirs = 0.0
    with torch.cuda.device(device), torch.inference_mode():
        peak = _bandwidth(items)
        print(f"a copy on the device: {peak:.0f} GB/s, 100 % below", file=sys.stderr)
        for line in _other_lines(kernels, layout):
            line.print(_device_microseconds(line.calls, items), peak)
        for tokens in LENGTHS:
            for high, low in ((1.0, 0.0), (HIGH_SHARE, LOW_SHARE)):
                line = _attention_line(kernels, layout, tokens, high, low)
                ours = _device_microseconds(line.calls, items)
                line.print(ours, peak)
            launch = _host_microseconds(line.calls, items)
            line = _sdpa_line(layout, tokens)
            theirs = _device_microseconds(line.calls, items)
            line.print(theirs, peak)
            print(f"  the host needs {launch:.0f} us to launch it uncaptured", file=sys.stderr)
    unit = f"us: attention, {LENGTHS[-1]} tokens, B = 0.33 (theirs: torch, B = 1)"
    return Measured(ours, theirs, unit, items, less_is_better=True)


def _check_device(device: str) -> None:
    try:
        asked = torch.device(device)
    except RuntimeError as wrong:
        raise PaskError(f"no such device: {device!r}", todo="use cuda or cuda:N") from wrong
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked.type != "cuda" or (asked.index or 0) >= found:
        raise PaskError(
            f"the Triton kernels need a CUDA device, not {device!r}",
            where="bench kernels",
            why=f"torch {torch.__version__} finds {found} here",
            todo="run it where there is one, or measure the CPU kernels: pask bench attention",
        )


def _layout(config: RunConfig) -> ModelLayout:
    model = config.model
    folder, _, _ = model_folder(
        model.path or model.source, model.revision, cache_dir(), model.sha256
    )
    layout = read_layout(folder)
    if layout.head_dim % GROUP:
        raise PaskError(
            f"head_dim {layout.head_dim} is no multiple of {GROUP}",
            where=model.name,
            why="quantised pages hold groups of 32 channels",
            todo="choose another model",
        )
    return layout


def _bandwidth(repetitions: int) -> float:
    """GB/s that a copy reads and writes."""
    to, source = torch.empty(2, COPIED_BYTES, dtype=torch.uint8, device="cuda")
    return 2 * COPIED_BYTES / _device_microseconds([partial(to.copy_, source)], repetitions) / 1e3


def _device_microseconds(calls: Sequence[Call], repetitions: int) -> float:
    """Time of one call on the device: many are captured in one graph, replayed back to back."""
    for call in calls:  # compiles it
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / (repetitions * ROUNDS * len(calls))


def _host_microseconds(calls: Sequence[Call], repetitions: int) -> float:
    """What one call costs the host, which does not wait for the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for repetition in range(repetitions):
        calls[repetition % len(calls)]()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * seconds / repetitions


def _table(kv_heads: int, slots: int) -> torch.Tensor:
    """Pages for every sequence and kv head, in no order: [sequences, kv_heads, pages] int32."""
    pages = -(-slots // PAGE_SLOTS)
    order = torch.randperm(SEQUENCES * kv_heads * pages, device="cuda")
    return order.view(SEQUENCES, kv_heads, pages).to(torch.int32)


def _high_region(layout: ModelLayout, slots: int) -> Region:
    table = _table(layout.kv_heads, slots)
    shape = (table.numel(), 2, PAGE_SLOTS, layout.head_dim)
    pages = HighPages(torch.randn(shape, dtype=torch.float16, device="cuda"))
    return Region(pages, table, _filled(layout, slots))


def _low_region(layout: ModelLayout, slots: int) -> Region:
    table = _table(layout.kv_heads, slots)
    shape = (table.numel(), 2, PAGE_SLOTS, layout.head_dim // 2)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    ranges = torch.rand(*shape[:3], layout.head_dim // GROUP, 2, device="cuda").half()
    return Region(LowPages(codes, ranges, 4), table, _filled(layout, slots))


def _filled(layout: ModelLayout, slots: int) -> torch.Tensor:
    return torch.full((SEQUENCES, layout.kv_heads), slots, dtype=torch.int32, device="cuda")


def _slot_bytes(pages: Pages) -> int:
    """Bytes of one key and value."""
    if isinstance(pages, HighPages):
        return 2 * pages.data[0, 0, 0].nbytes
    return 2 * (pages.codes[0, 0, 0].nbytes + pages.ranges[0, 0, 0].nbytes)


def _shift(layout: ModelLayout) -> KeyShift:
    shape = (2, SEQUENCES, layout.kv_heads, layout.head_dim)
    return KeyShift(*(torch.rand(shape, device="cuda") + 0.5).half())


def _queries(layout: ModelLayout) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (SEQUENCES, layout.kv_heads, layout.group_size, layout.head_dim)
    return torch.randn(shape, device="cuda"), torch.arange(SEQUENCES, device="cuda").int()


def _attention_line(
    kernels: ModuleType, layout: ModelLayout, tokens: int, high: float, low: float
) -> _Line:
    q, sequence = _queries(layout)
    shift = _shift(layout)
    calls: list[Call] = []
    moved = 0
    for _ in range(LAYERS):
        regions = [_high_region(layout, round(high * tokens))]
        if low:
            regions.append(_low_region(layout, round(low * tokens)))
        calls.append(partial(kernels.paged_attention, q, sequence, regions, shift))
        moved = sum(int(region.stop[0, 0]) * _slot_bytes(region.pages) for region in regions)
    share = "0.33" if low else "1"
    name = f"paged_attention, {tokens} tokens, B = {share}"
    return _Line(name, calls, SEQUENCES * layout.kv_heads * moved)


def _sdpa_line(layout: ModelLayout, tokens: int) -> _Line:
    q, _ = _queries(layout)
    q = q.reshape(SEQUENCES, layout.q_heads, 1, layout.head_dim).half()
    shape = (2, SEQUENCES, layout.kv_heads, tokens, layout.head_dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    layers = [torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(LAYERS)]
    calls = [partial(attend, q, k, v, enable_gqa=True) for k, v in layers]
    return _Line(f"torch's attention, {tokens} tokens, fp16", calls, layers[0].nbytes)


def _other_lines(kernels: ModuleType, layout: ModelLayout) -> list[_Line]:
    """The other six operations: appends of a prompt's 1,024 tokens, summaries of 8,192."""
    rows, tokens, chunk, chosen_channels = 1024, LENGTHS[0], 16, layout.head_dim // 4
    heads, head_dim = layout.kv_heads, layout.head_dim
    high, low = _high_region(layout, rows), _low_region(layout, rows)
    bounds = _high_region(layout, tokens // chunk)
    k, v = torch.randn(2, rows, heads, head_dim, device="cuda")
    sequence = torch.zeros(rows, dtype=torch.int32, device="cuda")
    slot = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None].repeat(1, heads)
    prompt_q = torch.randn(layout.q_heads, tokens, head_dim, device="cuda")
    prompt_k = torch.randn(heads, tokens, head_dim, device="cuda")
    q, sequences = _queries(layout)
    stored = _filled(layout, tokens)
    written = (high.pages, high.table, sequence, slot, k)
    coded = (low.pages, low.table, sequence, slot, k, v, _shift(layout))
    chosen = (q, sequences, bounds, stored, chunk, chosen_channels, 256)
    read_chunks = SEQUENCES * heads * (tokens // chunk) * chosen_channels * 2
    at = f", {rows} tokens"
    return [
        _Line(
            "append_high" + at,
            [partial(kernels.append_high, *written, v)],
            k.nbytes + v.nbytes + rows * heads * _slot_bytes(high.pages),
        ),
        _Line(
            "append_low, 4 bit" + at,
            [partial(kernels.append_low, *coded)],
            k.nbytes + v.nbytes + rows * heads * _slot_bytes(low.pages),
        ),
        _Line(
            f"append_bounds, chunks of {chunk}" + at,
            [partial(kernels.append_bounds, *written, chunk)],
            k.nbytes + rows // chunk * heads * _slot_bytes(high.pages),
        ),
        _Line(
            f"choose_slots, {tokens} tokens in chunks of {chunk}",
            [partial(kernels.choose_slots, *chosen)],
            read_chunks,
        ),
        _Line(
            f"window_mass, 32 of {tokens} queries",
            [partial(kernels.window_mass, prompt_q, prompt_k, 32)],
            prompt_k.nbytes + 4 * layout.q_heads * tokens,
        ),
        _Line(
            f"column_mass, {tokens} queries",
            [partial(kernels.column_mass, prompt_q, prompt_k)],
            prompt_q.nbytes + prompt_k.nbytes + 4 * layout.q_heads * tokens,
        ),
    ]
