"""Which body computes: Triton on a CUDA device, native code on a CPU that can, else plain torch."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

_FORCED = "PASK_KERNELS"


class Body(NamedTuple):
    """Whose numbers a CPU result has: "cpu" (native) or "torch", and what was it built from."""

    name: str
    build: str


def body() -> Body:
    """The body that computes on CPU tensors in this process."""
    if operations("cpu").__name__ == "kernels.cpu":
        return Body("cpu", import_module("kernels.cpu.library").build_name())
    return Body("torch", torch.__version__)


@cache
def operations(device: str) -> ModuleType:
    """The module whose operations compute on tensors of a device type ("cpu", "cuda").

    PASK_KERNELS=torch takes plain torch everywhere, PASK_KERNELS=cpu insists on native code for
    CPU tensors. Where a faster body cannot be had, says so once, in one line on stderr. Raises
    RuntimeError where native code is insisted on and cannot be had, ValueError for another word.
    """
    forced = os.environ.get(_FORCED, "")
    if forced not in ("", "torch", "cpu"):
        raise ValueError(f"{_FORCED}={forced!r} is unknown: torch or cpu")
    plain = import_module("kernels.reference")
    if forced == "torch" or device not in ("cpu", "cuda"):
        return plain
    if device == "cuda":
        try:
            return import_module("kernels.triton")
        except ImportError as reason:
            _say(f"no Triton kernels: {reason}; install triton")
            return plain
    build = import_module("kernels.cpu.build")
    try:
        import_module("kernels.cpu.library").loaded()
    except (build.Unavailable, OSError) as reason:
        if forced == "cpu":
            raise RuntimeError(f"{_FORCED}=cpu, but there is no native kernel: {reason}") from None
        _say(f"no native kernels: {reason}")
        return plain
    return import_module("kernels.cpu")


def _say(reason: str) -> None:
    print(f"kernels: {reason}. Plain torch computes the same, more slowly.", file=sys.stderr)
