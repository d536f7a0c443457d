"""The compiled library, and how its operations are called."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch

from kernels.paged import ChannelPages, HighPages, Pages

# As in src/common.hpp.
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_LOW_KINDS = {2: 3, 3: 4, 4: 5, 8: 6}
_CHANNEL_KIND = 7
_ERRORS = {1: "a row sees no slot", 2: "a table, slot or sequence index is out of range"}

_arrays: dict[int, type[ctypes.Array[ctypes.c_int64]]] = {}


@cache
def loaded() -> ctypes.CDLL:
    """The library; raises `kernels.cpu.build.Unavailable` where it cannot be built."""
    from kernels.cpu.build import library  # not before: it is also run as a program of its own

    return ctypes.CDLL(str(library()))


def build_name() -> str:
    """What decides the library's bits: the digest of its source and flags, and the compiler."""
    compiler = loaded().pask_compiler
    compiler.restype = ctypes.c_char_p
    digest = Path(loaded()._name).stem.removeprefix("kernels-")
    return f"{digest}-{compiler().decode()}"


@cache
def operation(name: str) -> Callable[[Iterable[int]], None]:
    """The operation `name`, taking its arguments as src/*.cpp reads them.

    It raises ValueError where a table or a slot does not fit. The GIL is not held meanwhile.
    """
    function = loaded()[name]
    function.restype = ctypes.c_int

    def call(values: Iterable[int]) -> None:
        given = tuple(values)
        kind = _arrays.get(len(given))
        if kind is None:
            kind = _arrays[len(given)] = ctypes.c_int64 * len(given)
        if status := function(kind(*given)):
            raise ValueError(f"{name}: {_ERRORS[status]}")

    return call


def pages_arguments(pages: Pages) -> tuple[int, ...]:
    """A pool as `Pages` reads it."""
    if isinstance(pages, HighPages):
        data = pages.data
        return _KINDS[data.dtype], data.data_ptr(), 0, data.shape[0], data.shape[2]
    codes = pages.codes
    kind = _CHANNEL_KIND if isinstance(pages, ChannelPages) else _LOW_KINDS[pages.bits]
    return (
        *(kind, codes.data_ptr(), pages.ranges.data_ptr()),
        *(codes.shape[0], codes.shape[2]),
    )


def table_arguments(table: torch.Tensor) -> tuple[int, ...]:
    """A table as `Table` reads it."""
    return table.data_ptr(), *table.shape


def fits(pages: Pages, head_dim: int) -> bool:
    """Whether the native operations read such pages; the plain ones read all."""
    if isinstance(pages, HighPages):
        data = pages.data
        return head_dim % 8 == 0 and data.dtype in _KINDS and data.is_contiguous()
    return pages.codes.is_contiguous() and pages.ranges.is_contiguous()


def ready(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x, contiguous and of the dtype; itself where it is both."""
    if x.dtype is dtype and x.is_contiguous():
        return x
    return x.to(dtype).contiguous()
