"""Bytes of so many slots of a model, by plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from pask.methods.contract import PromptInfo

PAGE = 16


@dataclass(frozen=True)
class Sizes:
    """Bytes of so many slots in each kv head of a model, pages rounded up."""

    layers: int
    kv_heads: int
    head_dim: int

    def _pages(self, slots: int, page: int, page_bytes: int) -> int:
        return self.layers * self.kv_heads * -(-slots // page) * page_bytes

    def high(self, slots: int) -> int:
        """16 bit, keys and values."""
        return self._pages(slots, PAGE, PAGE * 2 * self.head_dim * 2)

    def low(self, slots: int, bits: int) -> int:
        """Codes, and an fp16 scale and zero for each 32 channels, of keys and of values."""
        half = self.head_dim * bits // 8 + self.head_dim // 32 * 4
        return self._pages(slots, PAGE, PAGE * 2 * half)

    def channel2(self, slots: int) -> int:
        """32 tokens of 2 bit: keys with a scale and a zero a channel, values as above."""
        keys = 32 * self.head_dim // 4 + self.head_dim * 4
        values = 32 * self.head_dim // 4 + 32 * (self.head_dim // 32) * 4
        return self._pages(slots, 32, keys + values)

    def statistics(self) -> int:
        """Two fp16 numbers for each key channel."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


def sizes(info: PromptInfo) -> Sizes:
    return Sizes(info.layers, info.kv_heads, info.head_dim)
