"""What methods that keep some tokens share: scores per kv head, and a choice without chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pask.methods.contract import PromptInfo


def bounded(setting: float, info: PromptInfo, new_tokens: int | None = None) -> int:
    """Tokens of prompt and answer together that take the share `setting` of Full KV's bytes when
    `new_tokens` were decoded (as many as expected, unless given).

    A last page has s = (page_slots - 1) / 2 free slots on average, in both, so that
    C + s = B (P + T + s).
    """
    free_slots = (info.page_slots - 1) / 2
    decoded = info.expected_new_tokens if new_tokens is None else new_tokens
    return round(setting * (info.prompt_tokens + decoded + free_slots) - free_slots)


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
