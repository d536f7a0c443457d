"""What attention's output loses when some of a prompt's tokens are stored lower.

The paper's Equation 4, and TriAxialKV's calibration (arXiv 2605.17170): the queries, keys and
values of one exact prefill are kept for a few layers; the chosen tokens' keys and values are
replaced by what the store would hold of them, all else stays, and attention is computed once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.paged import GROUP
from kernels.reference.codes import dequantise, quantise
from pask.engine.kv_seat import KVShape
from pask.engine.kv_statistics import KeyStatistics
from pask.engine.kv_values import rounded
from pask.engine.transformer import Transformer
from pask.methods.contract import PromptInfo
from pask.methods.levels import CHANNEL_GROUP, Level

PROBED_LAYERS = 4

_QUERIES = 128
"""Queries that attend together: bounds the memory to so many rows of scores per query head."""


def probed_layers(layers: int, count: int = PROBED_LAYERS) -> tuple[int, ...]:
    """The middle layers of `count` equal stretches, e.g. 3, 11, 18 and 26 of 30; all of a model
    that has no more than `count`."""
    if count < 1:
        raise ValueError("at least one layer is probed")
    count = min(count, layers)
    return tuple((2 * n + 1) * layers // (2 * count) for n in range(count))


@dataclass(frozen=True)
class ProbedLayer:
    """One layer of a prompt: q [q_heads, P, head_dim] and, as the store holds them at HIGH, k and v
    [kv_heads, P, head_dim]; the keys' center and spread [kv_heads, 1, head_dim]; the exact output
    [q_heads, P, head_dim]. All fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    center: torch.Tensor
    spread: torch.Tensor
    output: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ProbedLayer:
        """From one layer's post-RoPE tensors in the shapes above."""
        q, k, v = (part.float().contiguous() for part in (q, k, v))
        statistics = KeyStatistics(KVShape(1, k.shape[0], k.shape[2]), 1, k.device)
        statistics.measure(0, [0], k)
        shift = statistics.shift(0)
        center, spread = (part[0, :, None].float() for part in (shift.center, shift.spread))
        return cls(q, k, v, center, spread, causal_attention(q, k, v))


@dataclass(frozen=True)
class PromptProbe:
    """A calibration prompt that tells what storing tokens lower does (`PromptEvidence`)."""

    info: PromptInfo
    layers: tuple[ProbedLayer, ...]

    @torch.inference_mode()
    def distortion(
        self,
        tokens: torch.Tensor,
        level: Level,
        *,
        shifted_keys: bool = False,
        channel_keys: bool = False,
    ) -> float:
        """How much attention's output changes when `tokens` alone are at `level`.

        tokens: [n] int64, ascending. The squared L2 distance between the outputs with and without
        the change, summed over the prompt's queries, the maximum over query heads, summed over the
        probed layers. Every query reads the changed tokens, a token's own one too. Released tokens
        are left out of the softmax; a query that would see none then sees its own token alone.
        With `channel_keys` (LOW2 only) keys share ranges per channel among 32 of the tokens, the
        last ones among those that are left. 0 for no tokens. ValueError for keys that are stored in
        two ways at once.
        """
        if channel_keys and (level is not Level.LOW2 or shifted_keys):
            raise ValueError("keys by channel are plain LOW2 keys")
        if not len(tokens) or level is Level.HIGH:
            return 0.0
        first = int(tokens[0])  # no query before it sees a change
        total = 0.0
        for layer in self.layers:
            k, v, released = layer.k, layer.v, None
            if level is Level.RELEASE:
                released = torch.zeros(k.shape[1], dtype=torch.bool)
                released[tokens] = True
            else:
                k, v = k.clone(), v.clone()
                k[:, tokens], v[:, tokens] = stored(
                    layer, tokens, level, shifted_keys=shifted_keys, channel_keys=channel_keys
                )
            changed = causal_attention(layer.q, k, v, released=released, first=first)
            by_head = (changed - layer.output[:, first:]).double().square().sum((1, 2))
            total += float(by_head.max())
        return total


def read_prompt(
    transformer: Transformer,
    info: PromptInfo,
    ids: Sequence[int],
    kv_dtype: torch.dtype,
    *,
    layers: int = PROBED_LAYERS,
) -> PromptProbe:
    """Prefill a prompt and keep what `layers` of its layers showed.

    Keys and values are rounded to `kv_dtype` first, as the store does before anything else.
    PaskError where they do not fit it.
    """
    chosen = probed_layers(info.layers, layers)
    found: list[ProbedLayer] = []

    def keep(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer in chosen:
            k, v = (rounded(layer, part, kv_dtype) for part in (k, v))
            found.append(ProbedLayer.of(q, k, v))

    with torch.inference_mode():
        transformer.prefill(ids, keep)
    return PromptProbe(info, tuple(found))


def stored(
    layer: ProbedLayer,
    tokens: torch.Tensor,
    level: Level,
    *,
    shifted_keys: bool,
    channel_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, n, head_dim] fp32 of `tokens`, as they are read at a low level."""
    k, v = layer.k[:, tokens], layer.v[:, tokens]
    values = dequantise(*quantise(v, level))
    if channel_keys:
        return _by_channel(k, level), values
    if shifted_keys:
        keys = dequantise(*quantise((k - layer.center) / layer.spread, level))
        return keys * layer.spread + layer.center, values
    return dequantise(*quantise(k, level)), values


def _by_channel(k: torch.Tensor, level: Level) -> torch.Tensor:
    """Through codes with ranges per channel, among 32 tokens or, at the end, fewer."""
    assert CHANNEL_GROUP == GROUP  # one quantiser, the axes exchanged
    heads, count, head_dim = k.shape
    missing = -count % GROUP
    # Copies of the last token change no range.
    padded = torch.cat((k, k[:, -1:].expand(-1, missing, -1)), dim=1)
    by_channel = padded.view(heads, -1, GROUP, head_dim).transpose(2, 3)
    read = dequantise(*quantise(by_channel, level)).transpose(2, 3)
    return read.reshape(heads, -1, head_dim)[:, :count]


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    released: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Outputs [q_heads, P - first, head_dim] of the queries from `first` on.

    q: [q_heads, P, head_dim], k, v: [kv_heads, P, head_dim], fp32. `released` [P] bool: tokens that
    nobody sees, but for a query that would see none: it sees its own.
    """
    q_heads, prompt, head_dim = q.shape
    kv_heads = k.shape[0]
    outputs = []
    aligned = first - first % _QUERIES  # equal inputs give equal bits, wherever a change begins
    for start in range(aligned, prompt, _QUERIES):
        stop = min(start + _QUERIES, prompt)
        rows = torch.arange(start, stop)[:, None]
        columns = torch.arange(stop)
        seen = columns <= rows
        if released is not None:
            seen &= ~released[:stop]
            seen |= (columns == rows) & ~seen.any(dim=1, keepdim=True)
        grouped = q[:, start:stop].reshape(kv_heads, -1, head_dim) * head_dim**-0.5
        scores = torch.bmm(grouped, k[:, :stop].transpose(1, 2))
        scores = scores.view(q_heads, stop - start, stop).masked_fill_(~seen, float("-inf"))
        weights = scores.softmax(dim=-1).view(kv_heads, -1, stop)
        outputs.append(torch.bmm(weights, v[:, :stop]).view(q_heads, -1, head_dim))
    return torch.cat(outputs, dim=1)[:, first - aligned :]
