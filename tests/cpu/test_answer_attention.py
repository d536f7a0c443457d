"""Parts of an attention: by hand, where nothing is seen, and beside a sink."""

from __future__ import annotations

import pytest
import torch

from pask.calibration.answer_attention import Part, squared_change, without_each


def test_a_part_by_hand() -> None:
    """Three tokens of weights 1, 2 and 5 with values 8, 0 and 4: 28/8; without the third 8/3."""
    scores = torch.tensor([[1.0, 2.0, 5.0]]).log()
    values = torch.tensor([[8.0], [0.0], [4.0]])
    parts = [Part.over(scores[:, n : n + 1], values[n : n + 1]) for n in range(3)]
    together = Part.over(scores, values)
    assert together.out.item() == pytest.approx(3.5)
    assert together.lse.exp().item() == pytest.approx(8.0)
    rest = without_each(Part.stacked(parts), 3)
    assert rest.out.flatten().tolist() == pytest.approx([20 / 7, 28 / 6, 8 / 3])
    assert rest.lse.exp().flatten().tolist() == pytest.approx([7.0, 6.0, 3.0])
    released = squared_change(rest, Part.stacked(parts), None)
    assert released.flatten().tolist() == pytest.approx(
        [(3.5 - 20 / 7) ** 2, (3.5 - 28 / 6) ** 2, (3.5 - 8 / 3) ** 2]
    )
    third = Part(rest.lse[2], rest.out[2])
    weaker = Part.over(torch.tensor([[1.0]]).log(), torch.tensor([[12.0]]))  # 5 -> 1, 4 -> 12
    assert squared_change(third, parts[2], weaker).item() == pytest.approx((3.5 - 20 / 4) ** 2)


def test_nothing_seen_is_nothing() -> None:
    unseen = Part.over(torch.full((2, 3), float("-inf")), torch.ones(3, 4))
    none = Part.over(torch.zeros(2, 0), torch.ones(0, 4))
    for part in (unseen, none):
        assert torch.equal(part.lse, torch.full((2,), float("-inf")))
        assert torch.equal(part.out, torch.zeros(2, 4))
    some = Part.over(torch.zeros(2, 3), torch.ones(3, 4))
    rest = without_each(Part.stacked([unseen, unseen, some]), 3)
    assert torch.equal(rest.out[0], some.out)
    assert torch.equal(rest.lse[2], unseen.lse)
    assert torch.equal(rest.out[2], unseen.out)
    assert torch.equal(squared_change(some, unseen, None), torch.zeros(2))


@pytest.mark.parametrize("score", [12.0, 40.0, 200.0])
def test_what_is_left_beside_nearly_all_of_the_mass_keeps_its_digits(score: float) -> None:
    """A sink with 1 - e^-12 of the mass or more: its release shows the others exactly."""
    values = torch.tensor([[1.0], [3.0], [5.0]])
    scores = torch.tensor([[score, 0.0, 0.0]])
    parts = Part.stacked(
        [Part.over(scores[:, :1], values[:1]), Part.over(scores[:, 1:], values[1:])]
    )
    rest = without_each(parts, 1)
    assert rest.out.item() == pytest.approx(4.0, rel=1e-6)
    exact = 3 / (1 + 2 * 2.718281828459045**-score)
    found = squared_change(rest, Part(parts.lse[:1], parts.out[:1]), None)
    assert found.item() == pytest.approx(exact**2, rel=1e-6)
