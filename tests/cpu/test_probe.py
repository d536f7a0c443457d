"""The probe against attention and quantisers written out in float64, and against the pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.paged import ChannelPages, KeyShift, LowPages
from kernels.reference import append_low, put_channel
from kernels.reference.attention import read_pages
from pask.calibration.probe import (
    ProbedLayer,
    PromptProbe,
    causal_attention,
    probed_layers,
    read_prompt,
    stored,
)
from pask.engine.loading import LoadedModel, load_model
from pask.errors import PaskError
from pask.methods.contract import PromptInfo
from pask.methods.levels import Level
from tests.cpu.tiny import LAYOUTS, tiny_folder

KV_HEADS, GROUP_SIZE, HEAD_DIM = 2, 2, 32
Q_HEADS = KV_HEADS * GROUP_SIZE


def some_info(prompt: int, layers: int = 1) -> PromptInfo:
    return PromptInfo(prompt, layers, KV_HEADS, GROUP_SIZE, HEAD_DIM)


def some_layer(prompt: int, seed: int = 0) -> ProbedLayer:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(Q_HEADS, prompt, HEAD_DIM, generator=generator) * 2
    k, v = torch.randn(2, KV_HEADS, prompt, HEAD_DIM, generator=generator).half().float()
    k[:, :, ::7] += 5  # some channels far off zero, as real keys have
    return ProbedLayer.of(q, k, v)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, released: set[int]
) -> torch.Tensor:
    """Query by query, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for head in range(q.shape[0]):
        own = head // (q.shape[0] // k.shape[0])
        for at in range(q.shape[1]):
            seen = [j for j in range(at + 1) if j not in released] or [at]
            scores = torch.stack([q[head, at] @ k[own, j] for j in seen]) / q.shape[2] ** 0.5
            weights = scores.exp() / scores.exp().sum()
            out[head, at] = weights @ v[own, seen]
    return out


def plain_loss(layer: ProbedLayer, k: torch.Tensor, v: torch.Tensor, released: set[int]) -> float:
    before = plain_attention(layer.q, layer.k, layer.v, set())
    after = plain_attention(layer.q, k, v, released)
    return max(float(((after - before)[head] ** 2).sum()) for head in range(len(before)))


def plain_quantiser(x: torch.Tensor, bits: int) -> torch.Tensor:
    """One group of 32 numbers [..., 32] through `bits` bits, range stored as fp16, in float64."""
    low, high = x.double().amin(-1, keepdim=True), x.double().amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().double()
    scale[scale == 0] = 1
    zero = low.half().double()
    return ((x.double() - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


@pytest.mark.parametrize(
    ("layers", "count", "chosen"),
    [
        (30, 4, (3, 11, 18, 26)),
        (36, 4, (4, 13, 22, 31)),
        (4, 4, (0, 1, 2, 3)),
        (2, 4, (0, 1)),
        (5, 1, (2,)),
    ],
)
def test_layers_lie_in_the_middle_of_equal_stretches(
    layers: int, count: int, chosen: tuple[int, ...]
) -> None:
    assert probed_layers(layers, count) == chosen


@pytest.mark.parametrize("prompt", [1, 5, 150])  # 150: more queries than attend together
def test_attention_is_plain_attention(prompt: int) -> None:
    layer = some_layer(prompt)
    wanted = plain_attention(layer.q, layer.k, layer.v, set())
    torch.testing.assert_close(layer.output.double(), wanted, rtol=1e-4, atol=1e-5)
    first = prompt // 2
    part = causal_attention(layer.q, layer.k, layer.v, first=first)
    torch.testing.assert_close(part, layer.output[:, first:], rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [[0], [3, 4], [0, 1, 2], [2, 9, 17], list(range(20))])
def test_released_tokens_are_seen_by_nobody(tokens: list[int]) -> None:
    layer = some_layer(20)
    probe = PromptProbe(some_info(20), (layer,))
    found = probe.distortion(torch.tensor(tokens), Level.RELEASE)
    assert found == pytest.approx(plain_loss(layer, layer.k, layer.v, set(tokens)), rel=1e-4)


def test_a_query_that_would_see_nothing_sees_itself() -> None:
    layer = some_layer(6)
    released = torch.tensor([True, True, True, False, False, False])
    out = causal_attention(layer.q, layer.k, layer.v, released=released)
    own = layer.v.repeat_interleave(GROUP_SIZE, dim=0)
    torch.testing.assert_close(out[:, :4], own[:, :4])


@pytest.mark.parametrize("level", [Level.LOW2, Level.LOW3, Level.LOW4, Level.LOW8])
@pytest.mark.parametrize("shifted", [False, True])
def test_low_tokens_alone_are_quantised(level: Level, shifted: bool) -> None:
    layer = some_layer(40)
    tokens = torch.tensor([1, 2, 11, 30, 39])
    k, v = layer.k.double(), layer.v.double()
    v[:, tokens] = plain_quantiser(v[:, tokens], level)
    if shifted:
        center = layer.k.double().mean(1, keepdim=True).half().double()
        spread = layer.k.double().std(1, keepdim=True, correction=0).half().double()
        k[:, tokens] = plain_quantiser((k[:, tokens] - center) / spread, level) * spread + center
    else:
        k[:, tokens] = plain_quantiser(k[:, tokens], level)
    found = PromptProbe(some_info(40), (layer,)).distortion(tokens, level, shifted_keys=shifted)
    assert found == pytest.approx(plain_loss(layer, k, v, set()), rel=1e-3)


@pytest.mark.parametrize("count", [3, 32, 50])
def test_keys_by_channel_share_ranges_among_32_tokens_or_the_rest(count: int) -> None:
    layer = some_layer(60)
    tokens = torch.arange(60)[-count:]
    k, v = layer.k.double(), layer.v.double()
    v[:, tokens] = plain_quantiser(v[:, tokens], 2)
    for group in tokens.split(32):
        by_channel = k[:, group].transpose(1, 2)
        k[:, group] = plain_quantiser(by_channel, 2).transpose(1, 2)
    probe = PromptProbe(some_info(60), (layer,))
    found = probe.distortion(tokens, Level.LOW2, channel_keys=True)
    assert found == pytest.approx(plain_loss(layer, k, v, set()), rel=1e-3)


def test_what_the_probe_reads_is_what_pages_hold() -> None:
    layer = some_layer(64)
    tokens = torch.arange(64)
    sequence, slot = torch.zeros(64, dtype=torch.int32), tokens.int()[:, None].expand(-1, 2)
    table = torch.arange(8, dtype=torch.int32).view(1, 2, 4)
    shift = KeyShift(layer.center[None, :, 0].half(), layer.spread[None, :, 0].half())
    k, v = layer.k.transpose(0, 1), layer.v.transpose(0, 1)
    pages = LowPages(
        torch.zeros(8, 2, 16, 16, dtype=torch.uint8), torch.zeros(8, 2, 16, 1, 2).half(), 4
    )
    for shifted in (False, True):
        append_low(pages, table, sequence, slot, k, v, shift if shifted else None)
        page = table[0].long().repeat_interleave(16, dim=1)
        keys, values = read_pages(pages, page, tokens.expand(2, -1) % 16)
        if shifted:
            keys = keys * layer.spread + layer.center
        found = stored(layer, tokens, Level.LOW4, shifted_keys=shifted, channel_keys=False)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)


def test_what_the_probe_reads_by_channel_is_what_pages_hold() -> None:
    layer = some_layer(64)
    tokens = torch.arange(64)
    pages = ChannelPages(
        torch.zeros(4, 2, 32, 8, dtype=torch.uint8), torch.zeros(4, 2, 32, 2).half()
    )
    by_group = (part.view(4, 32, HEAD_DIM) for part in (layer.k, layer.v))
    put_channel(pages, torch.arange(4), *by_group)
    page = torch.arange(4).view(2, 2).repeat_interleave(32, dim=1)
    keys, values = read_pages(pages, page, tokens.expand(2, -1) % 32)
    found = stored(layer, tokens, Level.LOW2, shifted_keys=False, channel_keys=True)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


def test_layers_add_up_and_the_worst_head_counts() -> None:
    layers = (some_layer(20, 1), some_layer(20, 2))
    tokens = torch.tensor([4, 5])
    apart = [PromptProbe(some_info(20), (one,)).distortion(tokens, Level.LOW2) for one in layers]
    together = PromptProbe(some_info(20), layers).distortion(tokens, Level.LOW2)
    assert together == sum(apart)
    assert min(apart) > 0


def test_nothing_changes_nothing() -> None:
    probe = PromptProbe(some_info(20), (some_layer(20),))
    assert probe.distortion(torch.tensor([], dtype=torch.int64), Level.RELEASE) == 0
    assert probe.distortion(torch.arange(20), Level.HIGH) == 0
    assert probe.distortion(torch.tensor([19]), Level.LOW4) > 0
    with pytest.raises(ValueError, match="keys by channel"):
        probe.distortion(torch.arange(20), Level.LOW4, channel_keys=True)
    with pytest.raises(ValueError, match="keys by channel"):
        probe.distortion(torch.arange(20), Level.LOW2, channel_keys=True, shifted_keys=True)


@pytest.fixture(scope="module", params=LAYOUTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_model(
        str(tiny_folder(folder, request.param, seed=4, head_dim=32, num_hidden_layers=5))
    )


def test_a_prompt_is_read_at_the_probed_layers_in_the_stores_dtype(model: LoadedModel) -> None:
    ids = list(range(3, 60))
    seen: dict[int, tuple[torch.Tensor, ...]] = {}
    model.transformer.prefill(
        ids, lambda layer, *parts: seen.update({layer: tuple(part.clone() for part in parts)})
    )
    info = PromptInfo(len(ids), 5, 2, 2, 32)
    probe = read_prompt(model.transformer, info, ids, torch.float16, layers=2)
    assert probe.info is info
    assert len(probe.layers) == 2
    for number, layer in zip((1, 3), probe.layers, strict=True):
        q, k, v = seen[number]
        assert torch.equal(layer.q, q)
        assert torch.equal(layer.k, k.half().float())
        assert torch.equal(layer.v, v.half().float())
        assert not torch.equal(layer.k, k)
    assert probe.distortion(torch.tensor([3, 50]), Level.LOW2) > 0


def test_values_that_the_store_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = load_model(str(tiny_folder(tmp_path, "llama", head_dim=32)))
    prefill = model.transformer.prefill

    class Loud:
        def prefill(self, ids, sink):  # type: ignore[no-untyped-def]
            return prefill(ids, lambda layer, q, k, v: sink(layer, q, k * 1e6, v))

    with pytest.raises(PaskError, match="do not fit into"):
        read_prompt(Loud(), PromptInfo(3, 2, 2, 2, 32), [3, 4, 5], torch.float16)  # type: ignore[arg-type]
