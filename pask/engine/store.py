"""One request's KV under one method: what is resident, and the bytes that it takes."""

from __future__ import annotations

import torch

from kernels import decode_attention
from pask.errors import PaskError
from pask.methods.contract import PromptInfo

KV_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class RequestKV:
    """Per layer one tensor [2 (key, value), kv_heads, slots, head_dim], grown page by page.

    Slots are not positions: keys are kept after RoPE at their original positions, so a slot may
    hold any token, and kv heads may hold different ones. A layer's slots are first the kept prompt
    tokens, then every decoded token. Pages are filled without a gap, so at most the last one is
    partly free; its free slots count to the decode stage, which is what they wait for.
    """

    def __init__(
        self, info: PromptInfo, *, kv_dtype: torch.dtype = torch.float16, page_slots: int = 16
    ) -> None:
        if page_slots < 1:
            raise ValueError("page_slots must be at least 1")
        self.info = info
        self.kv_dtype = kv_dtype
        self.page_slots = page_slots
        self._pages: list[torch.Tensor] = []
        self._kept: list[int] = []  # prompt tokens a kv head holds, by layer
        self._used: list[int] = []  # slots in use, by layer

    def add_prompt(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor | None
    ) -> None:
        """Take a layer's prompt KV, [kv_heads, prompt_tokens, head_dim] each; ascending layers.

        `tokens` [kv_heads, kept] int64 are the prompt tokens that stay, None for all. The rest is
        not copied. PaskError where a value is not finite, or not in the store's dtype.
        """
        if layer != len(self._pages):
            raise ValueError(f"layer {layer} given, layer {len(self._pages)} is next")
        kept = keys.shape[1] if tokens is None else tokens.shape[1]
        pages = self._empty(kept)
        for half, full in zip(pages, (keys, values), strict=True):
            if tokens is not None:
                full = full.gather(1, tokens[:, :, None].expand(-1, -1, full.shape[2]))
            half[:, :kept] = full
        if not bool(torch.isfinite(pages[:, :, :kept]).all()):
            if not bool(torch.isfinite(keys).all() and torch.isfinite(values).all()):
                raise PaskError(
                    f"layer {layer}: the model gives keys or values that are not finite",
                    todo="check its weights",
                )
            raise PaskError(
                f"layer {layer}: keys or values do not fit into {self.kv_dtype}",
                todo="set kv_dtype to bfloat16 or float32",
            )
        self._pages.append(pages)
        self._kept.append(kept)
        self._used.append(kept)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take one decoded token's key and value, [kv_heads, head_dim] each, in a layer."""
        used, pages = self._used[layer], self._pages[layer]
        if used == pages.shape[2]:
            grown = self._empty(used + 1)
            grown[:, :, :used] = pages
            self._pages[layer] = pages = grown
        pages[0, :, used] = key
        pages[1, :, used] = value
        self._used[layer] = used + 1

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attend with q [kv_heads, group, head_dim] over the resident slots; same shape."""
        keys, values = self._pages[layer][:, :, : self._used[layer]].float()
        return decode_attention(q, keys, values)

    def resident(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's resident keys and values, [kv_heads, slots in use, head_dim] each."""
        keys, values = self._pages[layer][:, :, : self._used[layer]]
        return keys, values

    def kept(self, layer: int) -> int:
        """Prompt tokens that each kv head of a layer holds."""
        return self._kept[layer]

    @property
    def decoded_tokens(self) -> int:
        """Decoded tokens whose KV every layer holds."""
        return self._used[-1] - self._kept[-1]

    @property
    def position(self) -> int:
        """Logical position of the next token, whatever is resident."""
        return self.info.prompt_tokens + self.decoded_tokens

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of the tensors that exist, by stage: {"prompt": ..., "decode": ...}."""
        total = sum(pages.numel() * pages.element_size() for pages in self._pages)
        prompt = sum(self._kept) * self._slot_bytes
        return {"prompt": prompt, "decode": total - prompt}

    def full_bytes(self, prompt_tokens: int, decode_tokens: int) -> int:
        """Bytes of a store like this one that had kept every token, pages rounded up."""
        return self.info.layers * self._round(prompt_tokens + decode_tokens) * self._slot_bytes

    def full_prompt_bytes(self) -> int:
        """Bytes of the whole prompt's slots; free slots count to the decode stage here too."""
        return self.info.layers * self.info.prompt_tokens * self._slot_bytes

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken (between two decode steps)."""
        info = self.info
        assert len(self._pages) == len(self._kept) == len(self._used) == info.layers
        for pages, kept, used in zip(self._pages, self._kept, self._used, strict=True):
            assert pages.dtype == self.kv_dtype
            assert pages.shape == (2, info.kv_heads, self._round(used), info.head_dim)
            assert pages.untyped_storage().nbytes() == pages.numel() * pages.element_size()
            assert 1 <= kept <= info.prompt_tokens
            assert used - kept == self.decoded_tokens >= 0
            assert bool(torch.isfinite(pages[:, :, :used]).all())
        full = self.full_bytes(info.prompt_tokens, self.decoded_tokens)
        assert 0 < sum(self.resident_bytes().values()) <= full

    @property
    def _slot_bytes(self) -> int:
        return 2 * self.info.kv_heads * self.info.head_dim * self.kv_dtype.itemsize

    def _round(self, slots: int) -> int:
        return -(-slots // self.page_slots) * self.page_slots

    def _empty(self, slots: int) -> torch.Tensor:
        info = self.info
        return torch.empty(2, info.kv_heads, self._round(slots), info.head_dim, dtype=self.kv_dtype)
