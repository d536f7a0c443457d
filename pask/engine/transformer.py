"""The model: prefill of one prompt, and one decode step of many requests, in fp32.

Two rules make a request's logits independent of its company, bit for bit. Rows of a decode step
are padded to a multiple of `ROW_MULTIPLE`, because a GEMM sums a row in the same order for any
number of rows that is such a multiple, and every request attends on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from pask.engine.layout import ModelLayout
from pask.engine.rope import RopeTable, rotate
from pask.engine.weights import LayerWeights, Weights

ROW_MULTIPLE = 4

LayerSink = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes a layer's number and its q [q_heads, P, head_dim], k and v [kv_heads, P, head_dim]."""


class KVStore(Protocol):
    """What a decode step needs of a request's KV; `pask.engine.store.RequestKV` is one."""

    @property
    def position(self) -> int: ...

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None: ...

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor: ...


class Transformer:
    """A decoder of the Llama family over `weights`; holds no state of any request."""

    def __init__(self, layout: ModelLayout, weights: Weights) -> None:
        self.layout = layout
        self.weights = weights
        self._rope = RopeTable(layout.rope, layout.head_dim)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], sink: LayerSink) -> torch.Tensor:
        """Read a prompt with exact causal attention; logits [vocab] fp32 of its last token.

        Each layer's post-RoPE q, k, v go to `sink` right after that layer's attention and are
        dropped then, so one layer's are alive at a time.
        """
        return self._head(self._read(ids, sink)[-1:])[0]

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [P, vocab] fp32 of every position of `ids`."""
        return self._head(self._read(ids, lambda *_: None))

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], stores: Sequence[KVStore], need: Sequence[bool]
    ) -> torch.Tensor:
        """Feed one token a request: appends its KV to the request's store, attends over that.

        Logits [number of True in `need`, vocab] fp32, in order, of the requests that need them.
        """
        rows = len(tokens)
        padding = [0] * (-rows % ROW_MULTIPLE)
        x = embedding(torch.tensor([*tokens, *padding]), self.weights.embedding)
        positions = torch.tensor([*(store.position for store in stores), *padding])
        cos, sin = self._rope.rows(positions)
        layout = self.layout
        for layer, weights in enumerate(self.weights.layers):
            q, k, v = self._project(weights, x, cos, sin)
            q = q.view(-1, layout.kv_heads, layout.group_size, layout.head_dim)
            attended = []
            for row, store in enumerate(stores):
                store.append(layer, k[row], v[row])
                attended.append(store.attend(layer, q[row]))
            attended += [torch.zeros_like(q[0])] * len(padding)
            x = self._finish(weights, x, torch.stack(attended).flatten(1))
        needed = torch.tensor([row for row in range(rows) if need[row]], dtype=torch.int64)
        if not len(needed):
            return torch.empty(0, layout.vocab_size)
        spare = needed.new_zeros(-len(needed) % ROW_MULTIPLE)
        return self._head(x[torch.cat((needed, spare))])[: len(needed)]

    def _read(self, ids: Sequence[int], sink: LayerSink) -> torch.Tensor:
        x = embedding(torch.tensor(ids), self.weights.embedding)
        cos, sin = self._rope.rows(torch.arange(len(ids)))
        for layer, weights in enumerate(self.weights.layers):
            q, k, v = (part.transpose(0, 1) for part in self._project(weights, x, cos, sin))
            attended = scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=True
            )[0]
            sink(layer, q, k, v)
            x = self._finish(weights, x, attended.transpose(0, 1).flatten(1))
        return x

    def _project(
        self, weights: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Post-RoPE q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim]."""
        layout = self.layout
        fused = linear(self._norm(x, weights.attention_norm), weights.qkv, weights.qkv_bias)
        heads = fused.view(len(x), -1, layout.head_dim)
        sizes = [layout.q_heads, layout.kv_heads, layout.kv_heads]
        q, k, v = torch.split(heads, sizes, dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _finish(
        self, weights: LayerWeights, x: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        """The rest of a layer: output projection and MLP, each added to the residual stream."""
        x = x + linear(attended, weights.out)
        fused = linear(self._norm(x, weights.mlp_norm), weights.gate_up)
        gate, up = fused.chunk(2, dim=-1)
        return x + linear(silu(gate) * up, weights.down)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.layout.rms_norm_eps)

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self._norm(x, self.weights.final_norm), self.weights.head)
