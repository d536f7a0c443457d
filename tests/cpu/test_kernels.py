"""Every body of the paged operations against naive sums, the grid of shapes in `kernel_cases`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.paged import BITS, ChannelPages, HighPages, KeyShift, LowPages, Region
from kernels.reference import dequantise, pack, quantise, unpack
from tests.cpu.kernel_cases import (
    ATTENTION,
    BODIES,
    AttentionSpec,
    Expected,
    RegionSpec,
    attention_case,
    check_attention,
    load_body,
    naive_attention,
    random_pages,
    random_table,
    read_codes,
)

HERE = [name for name in BODIES if name != "triton"]  # that one has tests of its own


@pytest.fixture(params=HERE)
def body(request: pytest.FixtureRequest) -> ModuleType:
    return load_body(request.param)


@pytest.fixture(scope="module")
def expected() -> dict[str, Expected]:
    return {}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, body: ModuleType, expected: dict[str, Expected]) -> None:
    case = attention_case(ATTENTION[name])
    if name not in expected:
        expected[name] = naive_attention(case)
    check_attention(case, expected[name], body)


RUNS = AttentionSpec(
    (
        RegionSpec("fp16", (130, 130, 131, 132, 40, 90)),
        RegionSpec("fp16", (17,) * 6, first=(30, 31, 32, 33, 3, 99), ring=48),
        RegionSpec("low4", (100, 101, 102, 103, 0, 77)),
        RegionSpec("low2", (9, 9, 9, 9, 70, 1)),
        RegionSpec("low8", (50, 51, 52, 53, 3, 9), first=(7, 6, 5, 4, 1, 0)),
        RegionSpec("channel2", (64, 64, 64, 64, 96, 0)),
    ),
    sequences=(1, 1, 1, 1, 0, 2),
    shift=True,
)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_a_row_does_not_depend_on_its_company(group: int, body: ModuleType) -> None:
    case = attention_case(AttentionSpec(**{**vars(RUNS), "group": group}))
    out, weights = case.run(body)
    for company in ([0], [3], [4], [5, 3, 0], [1, 2], [5, 4], [0, 1, 2]):
        less, less_weights = case.rows(company).run(body)
        assert torch.equal(less, out[company])
        assert torch.equal(less_weights, weights[company][..., : less_weights.shape[-1]])


def test_a_row_does_not_depend_on_the_size_of_a_ring(body: ModuleType) -> None:
    """A ring with room for a run has the same tokens elsewhere."""
    case = attention_case(AttentionSpec((RegionSpec("fp16", (20,), first=(90,), ring=32),)))
    region = case.regions[0]
    assert isinstance(region.pages, HighPages)
    wide = Region(
        HighPages(torch.zeros(2 * 7, 2, 16, 64, dtype=torch.float16)),
        random_table(1, 2, 7, seed=5),
        region.stop,
        region.start,
        torch.tensor([112], dtype=torch.int32),
    )
    for head in range(2):
        for slot in range(90, 110):
            old, new = slot % 32, slot % 112
            wide.pages.data[wide.table[0, head, new // 16], :, new % 16] = region.pages.data[
                region.table[0, head, old // 16], :, old % 16
            ]
    arguments = case.q, case.sequence
    assert torch.equal(
        body.paged_attention(*arguments, [region]), body.paged_attention(*arguments, [wide])
    )


def test_a_plain_shift_changes_no_bit(body: ModuleType) -> None:
    case = attention_case(AttentionSpec((RegionSpec("fp16", (9,)), RegionSpec("low4", (50,)))))
    plain = KeyShift(torch.zeros(1, 2, 64).half(), torch.ones(1, 2, 64).half())
    arguments = case.q, case.sequence, case.regions
    assert torch.equal(body.paged_attention(*arguments), body.paged_attention(*arguments, plain))


def test_threads_change_no_bit(body: ModuleType) -> None:
    many = (RegionSpec("fp16", (1500,) * 4), RegionSpec("low4", (700,) * 4))
    case = attention_case(AttentionSpec(many, sequences=(0, 0, 1, 2)))
    alone, _ = case.run(body)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(case.run(body)[0], alone)
    finally:
        torch.set_num_threads(threads)


def test_no_rows_no_answer(body: ModuleType) -> None:
    case = attention_case(AttentionSpec((RegionSpec("fp16", (9,)),))).rows([])
    assert body.paged_attention(case.q, case.sequence, case.regions).shape == (0, 2, 3, 64)


def test_a_row_that_sees_nothing_is_refused(body: ModuleType) -> None:
    case = attention_case(AttentionSpec((RegionSpec("fp16", (9, 0)),), sequences=(0, 0)))
    with pytest.raises(ValueError, match="sees no slot"):
        body.paged_attention(case.q, case.sequence, case.regions)


def test_native_code_refuses_tables_that_lead_out_of_the_pages() -> None:
    native = load_body("cpu")
    case = attention_case(AttentionSpec((RegionSpec("fp16", (40,)),)))
    for wrong in (-1, 1000):
        case.regions[0].table[0, 1, 1] = wrong
        with pytest.raises(ValueError, match="out of range"):
            native.paged_attention(case.q, case.sequence, case.regions)
        slot = torch.full((1, 2), 20, dtype=torch.int32)
        with pytest.raises(ValueError, match="out of range"):
            native.append_high(
                case.regions[0].pages,
                case.regions[0].table,
                case.sequence,
                slot,
                *torch.zeros(2, 1, 2, 64),
            )
    beyond = attention_case(AttentionSpec((RegionSpec("fp16", (40,)),)))
    with pytest.raises(ValueError, match="out of range"):
        native.paged_attention(beyond.q, beyond.sequence + 1, beyond.regions)


@pytest.mark.parametrize("bits", BITS)
def test_codes_lie_where_the_format_says(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 3, 96), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (5, 3, 96 // 8 * bits)
    assert np.array_equal(read_codes(packed.numpy(), bits, 96), codes.numpy())
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", BITS)
def test_quantised_values_are_near(bits: int) -> None:
    x = torch.randn(200, 64) * 3 + 5
    codes, ranges = quantise(x, bits)
    step = (x.view(200, 2, 32).amax(-1) - x.view(200, 2, 32).amin(-1)) / ((1 << bits) - 1)
    error = (dequantise(codes, ranges) - x).abs().view(200, 2, 32).amax(-1)
    assert bool((error <= 0.502 * step + 0.01).all())
    assert bool((codes.view(200, 2, 32).amax(-1) == (1 << bits) - 1).all())


def test_other_widths_and_odd_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="5-bit"):
        quantise(torch.zeros(32), 5)
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise(torch.zeros(40), 4)


def _writes(rows: int, kv_heads: int, page_slots: int) -> tuple[torch.Tensor, ...]:
    """Table, sequences and slots of an append; some rows write nothing, no slot is named twice."""
    table = random_table(3, kv_heads, 4, seed=rows)
    sequence = torch.randint(0, 3, (rows,), dtype=torch.int32)
    slot = torch.stack([torch.randperm(4 * page_slots)[:rows] for _ in range(kv_heads)], 1)
    slot[torch.rand(rows, kv_heads) < 0.3] = -1
    return table, sequence, slot.to(torch.int32)


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [32, 80])
def test_append_high(kind: str, head_dim: int, body: ModuleType) -> None:
    torch.manual_seed(head_dim)
    table, sequence, slot = _writes(20, 2, 7)
    pages = random_pages(kind, 24, 7, head_dim)
    wanted = pages.data.clone()
    k, v = torch.randn(2, 20, 2, head_dim) * torch.logspace(-9, 4, 20)[:, None, None]
    for row, head in torch.nonzero(slot >= 0).tolist():
        at = int(slot[row, head])
        page = int(table[sequence[row], head, at // 7])
        wanted[page, 0, at % 7] = k[row, head].to(wanted.dtype)
        wanted[page, 1, at % 7] = v[row, head].to(wanted.dtype)
    body.append_high(pages, table, sequence, slot, k, v)
    assert torch.equal(pages.data, wanted)


def _quantised(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The codes and ranges of one group of 32 fp32 values, in single IEEE operations."""
    top = np.float32((1 << bits) - 1)
    zero = np.float16(x.min())
    scale = np.float16(np.float32(x.max() - x.min()) / top)
    scale = np.float16(1) if scale == 0 else scale
    steps = np.rint((x - np.float32(zero)) / np.float32(scale))
    return np.clip(steps, 0, top).astype(np.int64), np.array([scale, zero])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shifted", [False, True])
def test_append_low_to_the_bit(bits: int, shifted: bool, body: ModuleType) -> None:
    torch.manual_seed(bits)
    table, sequence, slot = _writes(24, 2, 7)
    pages = random_pages(f"low{bits}", 24, 7, 64)
    assert isinstance(pages, LowPages)
    codes = read_codes(pages.codes.numpy(), bits, 64)
    ranges = pages.ranges.numpy().copy()
    # Of every size; some groups constant, some far from 0, some with values halfway between codes.
    k, v = torch.randn(2, 24, 2, 64).half().float() * torch.logspace(-8, 3, 24)[:, None, None]
    k[3], v[4], v[5] = 1.5, 0.0, v[5] * 1e-3 + 300
    v[6, :, :32] = torch.arange(32) / 2 % ((1 << bits) - 1)
    shift = None
    if shifted:
        center, spread = torch.randn(3, 2, 64).half(), (torch.rand(3, 2, 64) + 0.1).half()
        shift = KeyShift(center, spread)
    for row, head in torch.nonzero(slot >= 0).tolist():
        at, owner = int(slot[row, head]), int(sequence[row])
        page = int(table[owner, head, at // 7])
        key = k[row, head].numpy()
        if shift is not None:
            key = (key - shift.center[owner, head].float().numpy()) / shift.spread[
                owner, head
            ].float().numpy()
        for half, x in enumerate((key, v[row, head].numpy())):
            for group in range(2):
                part = slice(32 * group, 32 * group + 32)
                codes[page, half, at % 7, part], ranges[page, half, at % 7, group] = _quantised(
                    x[part], bits
                )
    body.append_low(pages, table, sequence, slot, k, v, shift)
    assert np.array_equal(read_codes(pages.codes.numpy(), bits, 64), codes)
    assert np.array_equal(pages.ranges.numpy(), ranges)


@pytest.mark.parametrize("head_dim", [32, 96])
def test_put_channel_to_the_bit(head_dim: int, body: ModuleType) -> None:
    """Keys by channel of a group's 32 tokens, values by token of 32 channels."""
    torch.manual_seed(head_dim)
    pages = random_pages("channel2", 9, 32, head_dim)
    assert isinstance(pages, ChannelPages)
    codes = read_codes(pages.codes.numpy(), 2, head_dim)
    ranges = pages.ranges.numpy().copy()
    k, v = torch.randn(2, 5, 32, head_dim).half().float()
    k *= torch.logspace(-8, 3, head_dim)
    k[1, :, 3], v[2, 7], v[3] = 1.5, 0.0, v[3] * 1e-3 + 300
    k[4, :, 0] = torch.arange(32) / 2 % 3  # halfway between codes
    page = torch.tensor([7, 0, 3, 8, 2])
    for group, at in enumerate(page.tolist()):
        for channel in range(head_dim):
            codes[at, 0, :, channel], ranges[at, 0, channel] = _quantised(
                k[group, :, channel].numpy(), 2
            )
        for token in range(32):
            for n in range(head_dim // 32):
                part = slice(32 * n, 32 * n + 32)
                codes[at, 1, token, part], ranges[at, 1, token * (head_dim // 32) + n] = _quantised(
                    v[group, token, part].numpy(), 2
                )
    body.put_channel(pages, page, k, v)
    assert np.array_equal(read_codes(pages.codes.numpy(), 2, head_dim), codes)
    assert np.array_equal(pages.ranges.numpy(), ranges)


def test_groups_of_another_size_are_refused(body: ModuleType) -> None:
    pages = random_pages("channel2", 2, 32, 32)
    with pytest.raises(ValueError, match="groups of 32"):
        body.put_channel(pages, torch.tensor([0]), *torch.zeros(2, 1, 31, 32))
    with pytest.raises(ValueError, match="hold 32 tokens"):
        random_pages("channel2", 2, 16, 32)


@pytest.mark.parametrize("kind", ["fp16", "fp32"])
@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_append_bounds(kind: str, chunk: int, body: ModuleType) -> None:
    """Rows in order, two sequences in turn, in two calls with a chunk across them."""
    torch.manual_seed(chunk)
    table, tokens = random_table(2, 2, 3), 41
    pages = HighPages(
        torch.full((12, 2, 16, 32), float("nan"), dtype=random_pages(kind, 1, 1, 32).data.dtype)
    )
    k = torch.randn(2 * tokens, 2, 32)
    sequence = torch.arange(2, dtype=torch.int32).repeat(tokens)
    slot = torch.arange(tokens).repeat_interleave(2)[:, None].repeat(1, 2).to(torch.int32)
    slot[70:, 1] = -1
    for part in (slice(0, 33), slice(33, None)):
        body.append_bounds(pages, table, sequence[part], slot[part], k[part], chunk)
    seen = 0
    for owner in range(2):
        for head in range(2):
            stored = k[owner::2, head][: 35 if head else tokens].to(pages.data.dtype)
            for first in range(0, len(stored), chunk):
                page = int(table[owner, head, first // chunk // 16])
                low, high = pages.data[page, :, first // chunk % 16]
                assert torch.equal(low, stored[first : first + chunk].amin(0))
                assert torch.equal(high, stored[first : first + chunk].amax(0))
                seen += 1
    assert int(pages.data.isnan().sum()) == (12 * 16 - seen) * 2 * 32


def _best_slots(
    q: np.ndarray, low: np.ndarray, high: np.ndarray, stop: int, chunk: int, channels: int, n: int
) -> list[int]:
    """RocketKV's choice for one kv head in float64: q [group, d], bounds [chunks, d]."""
    size = np.abs(q)
    top = sorted(range(q.shape[1]), key=lambda c: (-size[:, c].mean(), c))[:channels]
    total = np.zeros(stop)
    for member in q:
        logits = np.zeros(len(low))
        for c in top:
            logits += member[c] * (high if q[:, c].sum() > 0 else low)[:, c]
        share = np.abs(member[top]).sum() / np.abs(member).sum()
        logits /= np.sqrt(q.shape[1] * share)
        weights = np.exp(logits - logits.max())[np.arange(stop) // chunk]
        total += weights / weights.sum()
    best = sorted(range(stop), key=lambda slot: (-round(total[slot], 12), -slot))[:n]
    return sorted(best) + [-1] * (n - len(best))


@pytest.mark.parametrize(("group", "channels", "count"), [(1, 8, 5), (3, 16, 20), (7, 64, 33)])
def test_choose_slots(group: int, channels: int, count: int, body: ModuleType) -> None:
    """Small whole numbers, so that many chunks are equal and only the rule on ties decides."""
    torch.manual_seed(group)
    chunk, stops = 4, torch.tensor([[70, 3], [0, 64], [33, 9]], dtype=torch.int32)
    bounds = torch.randint(-2, 3, (12, 2, 8, 64)).sort(1).values
    pages = HighPages(bounds.to(torch.float16))
    table, sequence = random_table(2, 2, 3, seed=1), torch.tensor([1, 0, 0], dtype=torch.int32)
    q = torch.randint(-2, 3, (3, 2, group, 64)).float()
    region = Region(pages, table, (stops + chunk - 1) // chunk)
    got = body.choose_slots(q, sequence, region, stops, chunk, channels, count)
    assert got.dtype == torch.int32
    for row in range(3):
        for head in range(2):
            stop = int(stops[row, head])
            entries = [
                bounds[table[sequence[row], head, i // 8], :, i % 8].double().numpy()
                for i in range(-(-stop // chunk))
            ]
            wanted = [-1] * count
            if stop:
                low, high = np.stack(entries, 1)
                member = q[row, head].double().numpy()
                wanted = _best_slots(member, low, high, stop, chunk, channels, count)
            assert got[row, head].tolist() == wanted


def _masses(q: torch.Tensor, k: torch.Tensor, first: int) -> torch.Tensor:
    expected = torch.zeros(q.shape[:2], dtype=torch.float64)
    for head in range(q.shape[0]):
        keys = k[head // (q.shape[0] // k.shape[0])].double()
        for query in range(first, q.shape[1]):
            scores = keys[: query + 1] @ q[head, query].double() / q.shape[2] ** 0.5
            expected[head, : query + 1] += torch.softmax(scores, 0)
    return expected


SHAPES = [(4, 2, 37), (6, 2, 5), (3, 3, 1), (8, 1, 150)]


@pytest.mark.parametrize(("q_heads", "kv_heads", "prompt"), SHAPES)
@pytest.mark.parametrize("window", [1, 8, 32])
def test_window_mass(
    q_heads: int, kv_heads: int, prompt: int, window: int, body: ModuleType
) -> None:
    torch.manual_seed(prompt)
    q, k = torch.randn(q_heads, prompt, 16), torch.randn(kv_heads, prompt, 16)
    mass = body.window_mass(q, k, window)
    assert mass.dtype == torch.float32
    wanted = _masses(q, k, max(0, prompt - window))
    torch.testing.assert_close(mass.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("q_heads", "kv_heads", "prompt"), SHAPES)
def test_column_mass(q_heads: int, kv_heads: int, prompt: int, body: ModuleType) -> None:
    torch.manual_seed(prompt)
    q, k = torch.randn(q_heads, prompt, 32), torch.randn(kv_heads, prompt, 32)
    mass = body.column_mass(q, k)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), _masses(q, k, 0), rtol=1e-5, atol=1e-6)
    assert mass.sum(1).tolist() == pytest.approx([prompt] * q_heads, rel=1e-5)


class _Largest(TorchDispatchMode):
    """The most elements that a tensor made meanwhile has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_column_mass_never_holds_all_scores(body: ModuleType) -> None:
    block = import_module(f"{body.__name__}.scores").QUERY_BLOCK
    prompt = 10 * block
    with _Largest() as largest:
        body.column_mass(torch.randn(2, prompt, 8), torch.randn(1, prompt, 8))
    assert largest.elements == 2 * block * prompt
