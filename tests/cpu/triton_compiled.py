"""Compiles every Triton kernel for a GPU that need not be there: what the interpreter forgives.

    python -m tests.cpu.triton_compiled 90 [full]

The argument is a compute capability. Host functions run on CPU tensors, and what they would launch
is compiled and not launched. Prints a line for each compiled kernel; fails where one does not
compile or needs more shared memory than every GPU from Ampere on has.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import triton as kernels
from kernels.paged import ChannelPages, HighPages, KeyShift, LowPages, Pages, Region

SHARED_BYTES = 99 * 1024

_run = JITFunction.run
_compiled: set[int] = set()


class _Target:
    """A driver without a device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    kernel = _run(self, *args, grid=grid, warmup=True, **options)
    if id(kernel) in _compiled:
        return
    _compiled.add(id(kernel))
    shared = kernel.metadata.shared
    print(f"{self.fn.__name__}: {shared} bytes of shared memory", flush=True)
    assert shared <= SHARED_BYTES


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int32)


def _low_pages(bits: int, head_dim: int) -> LowPages:
    codes = torch.zeros(4, 2, 16, head_dim // 8 * bits, dtype=torch.uint8)
    return LowPages(codes, torch.zeros(4, 2, 16, head_dim // 32, 2).half(), bits)


def _channel_pages(head_dim: int) -> ChannelPages:
    codes = torch.zeros(4, 2, 32, head_dim // 4, dtype=torch.uint8)
    return ChannelPages(codes, torch.zeros(4, 2, head_dim, 2).half())


def _shift(head_dim: int) -> KeyShift:
    return KeyShift(*torch.zeros(2, 2, 2, head_dim).half())


def _attention(
    pages: Pages,
    group: int,
    head_dim: int,
    *,
    shift: bool = False,
    ring: bool = False,
    chosen: bool = False,
    probabilities: bool = False,
) -> None:
    more = (_ones(3, 2), _ones(2)) if ring else (None, None)
    kernels.paged_attention(
        torch.zeros(3, 2, group, head_dim),
        _ones(3),
        [Region(pages, _ones(2, 2, 8), _ones(3, 2), *more)],
        _shift(head_dim) if shift else None,
        chosen=_ones(3, 2, 40) if chosen else None,
        probabilities=probabilities,
    )


def _high_pages(head_dim: int, dtype: torch.dtype = torch.float16) -> HighPages:
    return HighPages(torch.zeros(4, 2, 16, head_dim, dtype=dtype))


def quick() -> None:
    """Every kernel once."""
    k = torch.zeros(3, 2, 64)
    at = _ones(2, 2, 8), _ones(3), _ones(3, 2)
    _attention(_high_pages(64), 3, 64, ring=True, probabilities=True)
    _attention(_low_pages(4, 64), 3, 64, shift=True)
    _attention(_channel_pages(64), 3, 64, probabilities=True)
    kernels.append_high(_high_pages(64), *at, k, k)
    kernels.append_low(_low_pages(4, 64), *at, k, k, _shift(64))
    kernels.append_bounds(_high_pages(64), *at, k, 4)
    bounds = Region(_high_pages(64), at[0], at[2])
    kernels.choose_slots(torch.zeros(3, 2, 3, 64), at[1], bounds, at[2], 4, 16, 32)
    kernels.column_mass(torch.zeros(6, 200, 64), torch.zeros(2, 200, 64))


def full() -> None:
    """Every kind of page, and the shapes that change what is generated."""
    for head_dim, group in ((32, 1), (80, 4), (96, 9), (128, 4), (128, 16), (256, 8)):
        _attention(_high_pages(head_dim), group, head_dim, chosen=True, probabilities=True)
        kernels.column_mass(torch.zeros(4, 70, head_dim), torch.zeros(2, 70, head_dim))
    _attention(_high_pages(64, torch.bfloat16), 7, 64, ring=True)
    _attention(_high_pages(64, torch.float32), 7, 64)
    for head_dim, group in ((32, 1), (96, 4), (128, 16), (256, 8)):
        _attention(_channel_pages(head_dim), group, head_dim)
    at = _ones(2, 2, 8), _ones(3), _ones(3, 2)
    for bits in (2, 3, 4, 8):
        for head_dim, group in ((96, 1), (128, 4)):
            k = torch.zeros(3, 2, head_dim)
            _attention(_low_pages(bits, head_dim), group, head_dim, shift=bits == 4)
            kernels.append_low(_low_pages(bits, head_dim), *at, k, k, None)


def main() -> None:
    driver.set_active(_Target(int(sys.argv[1])))
    JITFunction.run = _compile
    quick()
    if "full" in sys.argv[2:]:
        full()


if __name__ == "__main__":
    main()
