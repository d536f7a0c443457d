"""The model: embedding, layers and head over rows of tokens, in fp32.

A row is one token of one request. What a row attends to is not decided here: each layer hands its
queries, keys and values to an `Attention`, which is exact causal attention over a prompt during
prefill and a step of the KV store afterwards. All else is computed row by row, so a row's logits
do not depend on the rows beside it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from pask.engine.layout import ModelLayout
from pask.engine.linear import Linear
from pask.engine.rope import RopeTable, rotate
from pask.engine.weights import LayerWeights, Weights

CHUNK_ROWS = 2048
"""Rows of a long prompt that go through the projections and the MLP together."""

LayerSink = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes a layer's number and its q [q_heads, P, head_dim], k and v [kv_heads, P, head_dim]."""

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a layer's number and its post-RoPE q [rows, q_heads, head_dim], k and v [rows, kv_heads,
head_dim]; answers [rows, q_heads, head_dim]."""


@dataclass(frozen=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, weights: LayerWeights) -> _Layer:
        return cls(
            attention_norm=weights.attention_norm,
            qkv=Linear(weights.qkv, weights.qkv_bias),
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            out=Linear(weights.out),
            mlp_norm=weights.mlp_norm,
            gate_up=Linear(weights.gate_up),
            down=Linear(weights.down),
        )


class Transformer:
    """A decoder of the Llama family over `weights`; holds no state of any request."""

    def __init__(self, layout: ModelLayout, weights: Weights) -> None:
        self.layout = layout
        self._embedding = weights.embedding
        self._layers = [_Layer.of(layer) for layer in weights.layers]
        self._final_norm = weights.final_norm
        self._head = Linear(weights.head)
        self._rope = RopeTable(layout.rope, layout.head_dim)

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """[rows, hidden] of token ids: what layer 0 takes."""
        return embedding(torch.tensor(tokens, dtype=torch.int64), self._embedding)

    @torch.inference_mode()
    def forward(
        self,
        x: torch.Tensor,
        positions: Sequence[int],
        attention: Attention,
        *,
        first_layer: int = 0,
        saved: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Rows x [rows, hidden] at logical `positions` through `first_layer` and all above it.

        `saved` is shown each layer's input, [rows, hidden]. Answers what the head takes.
        """
        cos, sin = self._rope.rows(torch.tensor(positions, dtype=torch.int64))
        for number in range(first_layer, len(self._layers)):
            layer = self._layers[number]
            if saved is not None:
                saved(number, x)
            q, k, v = self._project(layer, x, cos, sin)
            x = self._finish(layer, x, attention(number, q, k, v).flatten(1))
        return x

    @torch.inference_mode()
    def project(
        self, layer: int, x: torch.Tensor, positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's post-RoPE q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim], of
        its input x [rows, hidden] at logical `positions`, as `forward` hands them to attention."""
        cos, sin = self._rope.rows(torch.tensor(positions, dtype=torch.int64))
        return self._project(self._layers[layer], x, cos, sin)

    @torch.inference_mode()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] fp32 of rows that went through all layers."""
        return self._head(self._norm(x, self._final_norm))

    def prefill(self, ids: Sequence[int], sink: LayerSink) -> torch.Tensor:
        """Read a prompt with exact causal attention; logits [vocab] fp32 of its last token.

        Each layer's post-RoPE q, k, v go to `sink` right after that layer's attention and are
        dropped then, so one layer's are alive at a time.
        """
        return self.logits(self._read(ids, sink)[-1:])[0]

    def all_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [P, vocab] fp32 of every position of `ids`."""
        return self.logits(self._read(ids, lambda *_: None))

    def _read(self, ids: Sequence[int], sink: LayerSink) -> torch.Tensor:
        def causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
            attended = scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=True
            )[0]
            sink(layer, q, k, v)
            return attended.transpose(0, 1)

        return self.forward(self.embed(ids), range(len(ids)), causal)

    def _project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Post-RoPE q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim]."""
        layout = self.layout
        fused = layer.qkv(self._norm(x, layer.attention_norm))
        heads = fused.view(len(x), -1, layout.head_dim)
        sizes = [layout.q_heads, layout.kv_heads, layout.kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _finish(self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer: output projection and MLP, each added to the residual stream."""
        if len(x) > CHUNK_ROWS:  # the MLP's inner rows would be the largest tensor of a prefill
            pairs = zip(torch.split(x, CHUNK_ROWS), torch.split(attended, CHUNK_ROWS), strict=True)
            return torch.cat([self._finish(layer, *pair) for pair in pairs])
        x = x + layer.out(attended)
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return x + layer.down(silu(gate) * up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.layout.rms_norm_eps)
