"""Keys and values that the store can hold: finite, and finite in its dtype."""

from __future__ import annotations

import torch

from pask.errors import PaskError


def check_values(layer: int, values: torch.Tensor, dtype: torch.dtype) -> None:
    """PaskError where a layer's keys or values are not finite in the store's dtype."""
    # Rounding keeps the order, so the extremes tell of all; a NaN is both of them.
    extremes = torch.stack(torch.aminmax(values))
    if bool(torch.isfinite(extremes.to(dtype)).all()):
        return
    if not bool(torch.isfinite(extremes).all()):
        raise PaskError(
            f"layer {layer}: the model gives keys or values that are not finite",
            todo="check its weights",
        )
    raise PaskError(
        f"layer {layer}: keys or values do not fit into {dtype}",
        todo="set kv_dtype to bfloat16 or float32",
    )


def rounded(layer: int, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Checked keys or values of a layer, in the store's dtype."""
    check_values(layer, values, dtype)
    return values.to(dtype)
