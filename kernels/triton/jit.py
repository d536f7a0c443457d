"""`triton.jit` with a type: the untyped decorator would untype all that it decorates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """The kernel, or the part of kernels, that a function's source describes."""
    return triton.jit(function)


def jit_varying(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` where the named integers change from call to call.

    Triton compiles a kernel anew for integers that are 1 or multiples of 16; for these it does not.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(names))

    return compiled
