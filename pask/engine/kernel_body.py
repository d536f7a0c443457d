"""Which kernels compute here, as a part of what decides a result."""

from __future__ import annotations

import kernels
from pask.errors import PaskError


def kernel_body() -> str:
    """The kernels that compute on CPU tensors in this process and what they were built from, e.g.
    "cpu 13f5c93bed796f01-12.2.0"; PaskError where PASK_KERNELS asks for what cannot be had."""
    try:
        return " ".join(kernels.body())
    except (RuntimeError, ValueError) as error:
        raise PaskError(
            "the kernels that were asked for cannot be used",
            where="PASK_KERNELS",
            why=str(error),
            todo="unset it; for native kernels a C++ compiler and AVX2 are needed",
        ) from error
