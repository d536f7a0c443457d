"""Quantised values: what a code is, and where a channel's code lies."""

from __future__ import annotations

from math import prod

import torch

from kernels.paged import BITS, GROUP

_WORDS = 8


def quantise(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Asymmetric `bits`-bit codes in groups of 32 channels, each with a range of its own.

    Over a group, in fp32 with the zero and the scale as they are stored:

        zero = fp16(min x),  scale = fp16((max x - min x) / (2^bits - 1)), 1 where that is 0,
        code = clamp(round((x - zero) / scale), 0, 2^bits - 1), halves to even

    x: [..., head_dim]; answers codes [..., head_dim] uint8 and ranges [..., head_dim // 32,
    2 (scale, zero)] fp16. Raises ValueError for another width or a head_dim that is no multiple.
    """
    _check_bits(bits)
    if x.shape[-1] % GROUP:
        raise ValueError(f"head_dim {x.shape[-1]} is no multiple of {GROUP}")
    groups = _grouped(x.float(), GROUP)
    top = (1 << bits) - 1
    low, high = groups.amin(-1), groups.amax(-1)
    zero = low.half()
    # By a tensor: torch may multiply by the reciprocal where the divisor is a number.
    scale = ((high - low) / torch.full_like(low, top)).half()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    steps = (groups - zero.float()[..., None]) / scale.float()[..., None]
    codes = steps.round().clamp(0, top).to(torch.uint8)
    return codes.flatten(-2), torch.stack((scale, zero), -1)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., head_dim] uint8 as bytes [..., head_dim // 8 * bits] uint8, group after group.

    Widths 2, 4 and 8: a group is eight little-endian words of 4 * bits bits; word w holds channels
    w, w + 8, w + 16, w + 24, the first in its lowest bits, so that eight channels at a time come
    out of eight words by one shift. Width 3: the low two bits of every code as for width 2, then
    one little-endian uint32 whose bit c is the high bit of channel c.
    """
    _check_bits(bits)
    if bits == 3:
        ones = torch.arange(8, device=codes.device)
        high = _grouped(codes >> 2, 4, 8).long()
        high_bytes = (high << ones).sum(-1).to(torch.uint8)
        low = _grouped(pack(codes & 3, 2), 8)
        return torch.cat((low, high_bytes), -1).flatten(-2)
    by_word = _grouped(codes, 4, _WORDS).transpose(-1, -2)  # [..., groups, word, place]
    if bits == 8:
        return by_word.flatten(-3).contiguous()
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=codes.device) * bits
    parts = _grouped(by_word, per_byte).long() << shifts
    return parts.sum(-1).to(torch.uint8).flatten(-3)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes [..., head_dim] uint8 that `pack` put into [..., head_dim // 8 * bits] bytes."""
    _check_bits(bits)
    if bits == 3:
        groups = _grouped(packed, 12)
        low = unpack(groups[..., :8].flatten(-2), 2)
        ones = torch.arange(8, dtype=torch.uint8, device=packed.device)
        high = (groups[..., 8:, None] >> ones) & 1
        return low | (high.flatten(-3) << 2)
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, dtype=torch.uint8, device=packed.device) * bits
    parts = (packed[..., None] >> shifts) & ((1 << bits) - 1)  # channels in word order
    by_word = _grouped(parts.flatten(-2), _WORDS, 4)
    return by_word.transpose(-1, -2).flatten(-3).contiguous()


def dequantise(codes: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    """code * scale + zero in fp32: codes [..., head_dim] uint8, ranges as `quantise` gives them."""
    scale, zero = ranges.float().unbind(-1)
    groups = _grouped(codes.float(), GROUP)
    return (groups * scale[..., None] + zero[..., None]).flatten(-2)


def _grouped(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The last dimension cut into [-1, *sizes]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // prod(sizes), *sizes)


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"{bits}-bit codes are not supported: {BITS}")
