"""What a KV store should hold, told by a dictionary of tokens, and attention over it in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from pask.engine.kv_store import Seat
from pask.methods.levels import Level

GROUP = 32

Pair = tuple[np.ndarray, np.ndarray]
"""Key and value, [head_dim] each."""


def quantised(x: np.ndarray, bits: int) -> np.ndarray:
    """x [head_dim] as its codes give it back, group by group."""
    out = np.empty(len(x))
    for start in range(0, len(x), GROUP):
        part = x[start : start + GROUP].astype(np.float32)
        zero = np.float32(np.float16(part.min()))
        scale = np.float32(np.float16((part.max() - part.min()) / np.float32(2**bits - 1)))
        scale = scale if scale else np.float32(1)
        codes = np.clip(np.rint((part - zero) / scale), 0, 2**bits - 1)
        out[start : start + GROUP] = codes.astype(np.float64) * scale + zero
    return out


@dataclass
class Token:
    """One token in one layer and kv head: what 16 bit holds of it, [head_dim] each."""

    level: Level
    key: np.ndarray
    value: np.ndarray
    given_back: Pair | None = None  # by its low level, once that was asked for


@dataclass
class SeatModel:
    """A sequence: by (layer, kv head) its kept prompt tokens and all decoded ones."""

    prompt_tokens: int
    recent: int
    ring_slots: int
    has_statistics: bool  # low keys are stored freed of the prompt's
    layers: int
    kv_heads: int
    channel_keys: bool = False  # keys at LOW2 are quantised by channel of 32 tokens
    prompt: dict[tuple[int, int], dict[int, Token]] = field(default_factory=dict)
    decoded: dict[tuple[int, int], list[Token]] = field(default_factory=dict)
    evicted: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # positions
    statistics: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    written: int = 0  # the most tokens that were ever decoded
    cut_from: int = 0

    @classmethod
    def of(cls, seat: Seat, layers: int, kv_heads: int) -> SeatModel:
        """An empty one."""
        statistics = seat.normalise and bool(seat.levels)
        shape = layers, kv_heads, seat.channel_keys
        model = cls(seat.prompt_tokens, seat.recent, seat.ring_slots, statistics, *shape)
        for where in model.heads:
            model.prompt[where], model.decoded[where], model.evicted[where] = {}, [], set()
        return model

    def fill(
        self,
        layer: int,
        keys: np.ndarray,
        values: np.ndarray,
        tokens: Mapping[Level, torch.Tensor] | None,
    ) -> None:
        """A layer's prompt, [kv_heads, P, head_dim] float16, and what is kept of it."""
        everything = torch.arange(keys.shape[1]).expand(self.kv_heads, -1)
        for head in range(self.kv_heads):
            wide = keys[head].astype(np.float64)
            center, spread = wide.mean(axis=0), np.maximum(wide.std(axis=0), 2.0**-6)
            self.statistics[layer, head] = (
                center.astype(np.float16).astype(np.float64),
                spread.astype(np.float16).astype(np.float64),
            )
            for level, named in (tokens or {Level.HIGH: everything}).items():
                for token in named[head].tolist():
                    self.prompt[layer, head][token] = Token(
                        level, keys[head, token], values[head, token]
                    )
            if self.channel_keys and tokens and Level.LOW2 in tokens:
                self._give_back_groups((layer, head), tokens[Level.LOW2][head].tolist())

    def _give_back_groups(self, where: tuple[int, int], named: list[int]) -> None:
        for start in range(0, len(named), GROUP):
            group = [self.prompt[where][token] for token in named[start : start + GROUP]]
            by_channel = np.stack([token.key for token in group], axis=1)
            keys = np.stack([quantised(channel, 2) for channel in by_channel], axis=1)
            for token, key in zip(group, keys, strict=True):
                token.given_back = key, quantised(token.value, 2)

    def low_kind(self, level: Level) -> str:
        by_channel = self.channel_keys and level is Level.LOW2
        return "channel2" if by_channel else f"low{int(level)}"

    @property
    def fed(self) -> int:
        return len(self.decoded[0, 0])

    @property
    def heads(self) -> list[tuple[int, int]]:
        return [(layer, head) for layer in range(self.layers) for head in range(self.kv_heads)]

    def low(self, where: tuple[int, int], token: Token) -> Pair:
        """A token as its low level gives it back."""
        if token.given_back is None:
            key, bits = token.key.astype(np.float32), int(token.level)
            if self.has_statistics:
                center, spread = self.statistics[where]
                stored = quantised((key - np.float32(center)) / np.float32(spread), bits)
                key = stored * spread + center
            else:
                key = quantised(key, bits)
            token.given_back = key, quantised(token.value, bits)
        return token.given_back

    def resident(self, where: tuple[int, int], fed: int) -> dict[str, dict[int, Pair]]:
        """By kind of region the tokens that the last of the first `fed` decoded tokens sees."""
        found: dict[str, dict[int, Pair]] = {}
        tokens = dict(self.prompt[where])
        first_recent = fed - 1 - self.recent
        for number, token in enumerate(self.decoded[where][:fed]):
            tokens[self.prompt_tokens + number] = token
        for position, token in tokens.items():
            if position in self.evicted[where]:
                continue
            number = position - self.prompt_tokens
            if token.level is Level.HIGH:
                kind, pair = "high", (token.key, token.value)
            elif number >= max(first_recent, 0):
                kind, pair = "recent", (token.key, token.value)
            elif token.level is Level.RELEASE:
                continue
            else:
                kind, pair = self.low_kind(token.level), self.low(where, token)
            found.setdefault(kind, {})[position] = pair
        return found

    def attention(
        self, where: tuple[int, int], fed: int, q: np.ndarray
    ) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Positions that one query [head_dim] sees, its softmax over them, and what comes out."""
        seen: dict[int, Pair] = {}
        for tokens in self.resident(where, fed).values():
            seen |= tokens
        keys, values = (
            np.stack([pair[part] for pair in seen.values()]).astype(np.float64) for part in (0, 1)
        )
        scores = keys @ q.astype(np.float64) / np.sqrt(len(q))
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        return list(seen), weights, weights @ values

    def bytes(self, fed: int, page_slots: int, head_dim: int) -> int:
        """Whole pages of everything that is resident after `fed` tokens, by a closed formula."""
        total = 0
        for where in self.heads:
            tokens = [*self.prompt[where].values(), *self.decoded[where][:fed]]
            held = self.resident(where, fed)
            for level in {token.level for token in tokens} - {Level.RELEASE}:
                high = level is Level.HIGH
                kind = "high" if high else self.low_kind(level)
                size = GROUP if kind == "channel2" else page_slots
                pages = -(-len(held.get(kind, {})) // size)
                total += pages * size * slot_bytes(level, head_dim)
            waited = sum(token.level is not Level.HIGH for token in self.decoded[where][:fed])
            most = min(self.recent + 1, self.ring_slots)
            pages = min(-(-waited // page_slots), -(-most // page_slots))
            total += pages * page_slots * slot_bytes(Level.HIGH, head_dim)
            total += 2 * 2 * head_dim * self.has_statistics
        return total


def slot_bytes(level: Level, head_dim: int) -> int:
    """Key and value of one token of one kv head: 16 bit, or codes with fp16 scales and zeros (as
    many by channel of 32 tokens as by token of 32 channels)."""
    if level is Level.HIGH:
        return 2 * 2 * head_dim
    return 2 * (head_dim * int(level) // 8 + head_dim // GROUP * 4)
