"""The packed product against double precision, and a row's bits in other company."""

from __future__ import annotations

import pytest
import torch

from pask.engine.linear import Linear

SHAPES = [(96, 64), (520, 64), (64, 96), (1, 7), (33, 130), (960, 576)]


def made(shape: tuple[int, int], bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator)
    return weight, torch.randn(shape[0], generator=generator) if bias else None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_and_its_independence_of_other_rows(
    shape: tuple[int, int], bias: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, shift = made(shape, bias)
    linear = Linear(weight, shift)
    assert linear.packed is packed
    x = torch.randn(300, shape[1], generator=torch.Generator().manual_seed(1))
    whole = linear(x)
    expected = x.double() @ weight.double().T
    if shift is not None:
        expected += shift.double()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 4, 5, 7, 16, 31, 33, 64, 65, 200):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[-rows:]), whole[-rows:])
    assert linear(x[:0]).shape == (0, shape[0])
