"""What methods that keep some tokens share: scores per kv head, and a choice without chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pask.methods.contract import PromptInfo


def by_kv_head(mass: torch.Tensor, info: PromptInfo) -> torch.Tensor:
    """Attention mass [q_heads, tokens] as [kv_heads, tokens]: the mean over each query group."""
    return mass.view(info.kv_heads, info.group_size, -1).mean(dim=1)


def top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the `count` highest scores of each row: [..., n] to [..., count] int64.

    Ascending. Of equal scores the later position wins. 0 <= count <= n.
    """
    # A stable descending sort of the reversed row puts the later of two equals first.
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)
    kept = scores.shape[-1] - 1 - order[..., :count]
    return kept.sort(dim=-1).values
