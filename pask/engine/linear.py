"""x @ W^T + b in fp32, the same bits for a row whatever other rows are computed with it."""

from __future__ import annotations

import torch
from torch.nn import functional

_ROW_MULTIPLE = 4


class Linear:
    """One weight matrix, packed once into the form in which the CPU multiplies fastest.

    oneDNN's packed product sums a row in one order, for any number of rows. Where torch has no
    oneDNN, or the weight lies on a GPU, rows are padded to a multiple of 4, for which the plain
    GEMM keeps its order too (on a GPU that is not promised).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`weight` [out, in] and `bias` [out], fp32; the packed form is a copy."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        usable: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.packed = weight.device.type == "cpu" and usable
        if self.packed:
            # The number is a hint to the layout, not a limit; a decode step has about so many rows.
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        rows = len(x)
        if not rows:
            return x.new_empty(0, self.out_features)
        if self.packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x.contiguous(), self._weight, self._bias, "none", [], ""
            )
            return product
        padded = functional.pad(x, (0, 0, 0, -rows % _ROW_MULTIPLE))
        return functional.linear(padded, self._weight, self._bias)[:rows]
