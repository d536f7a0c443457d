"""Chunk summaries of the keys, and the slots they single out (RocketKV, arXiv:2502.14051)."""

from __future__ import annotations

import torch

from kernels.paged import HighPages, Region
from kernels.reference.append import destinations
from kernels.reference.attention import read_pages


def append_bounds(
    pages: HighPages,
    table: torch.Tensor,
    sequence: torch.Tensor,
    slot: torch.Tensor,
    k: torch.Tensor,
    chunk: int,
) -> None:
    """Widen the bounds of the chunk that each row's token joins, in place, rows in order.

    A page slot of a summary holds (min, max) of a chunk's keys, by channel, where a KV page holds
    (key, value); the token at slot s belongs to chunk s // chunk and opens it where s % chunk is 0.

    k: [rows, kv_heads, head_dim], rounded to the pages' dtype; slot: [rows, kv_heads] int32, the
    token's slot (not the chunk's), -1 where nothing is written.
    """
    for row in range(k.shape[0]):
        owner, tokens = sequence[row : row + 1], slot[row : row + 1]
        chunks = torch.where(tokens >= 0, tokens // chunk, -1)
        _, heads, page, place = destinations(table, owner, chunks, pages.page_slots)
        key = k[row, heads].to(pages.data.dtype)
        opens = (tokens[0, heads] % chunk == 0)[:, None]
        low, high = pages.data[page, 0, place], pages.data[page, 1, place]
        pages.data[page, 0, place] = torch.where(opens, key, torch.minimum(low, key))
        pages.data[page, 1, place] = torch.where(opens, key, torch.maximum(high, key))


def choose_slots(
    q: torch.Tensor,
    sequence: torch.Tensor,
    bounds: Region,
    stop: torch.Tensor,
    chunk: int,
    channels: int,
    count: int,
) -> torch.Tensor:
    """The `count` stored tokens of each row and kv head whose chunks promise the most attention.

    Per kv head, over its query group (arXiv:2502.14051, section 3.4): of the `channels` channels c
    of largest mean |q| (the lower channel where two are equal), a chunk's logit for query g is

        sum_c q_g[c] * (max_c where sum_g q_g[c] > 0, else min_c) / sqrt(head_dim * share_g),
        share_g = sum_c |q_g[c]| / sum over all channels |q_g|

    Every token has its chunk's logit; a softmax over the stored tokens, its mean over the group,
    and the best tokens win, the higher slot where two are equal.

    q: [rows, kv_heads, group, head_dim] fp32; stop: [rows, kv_heads] int32, the stored tokens,
    whose ceil(stop / chunk) chunks are the first slots of `bounds`. Answers [rows, kv_heads,
    count] int32, ascending, then -1 where there are fewer than `count` tokens.
    """
    answer = torch.full((*stop.shape, count), -1, dtype=torch.int32, device=q.device)
    slots = bounds.pages.page_slots
    for row, head in torch.cartesian_prod(*(torch.arange(n) for n in stop.shape)).tolist():
        stored = int(stop[row, head])
        if stored == 0:
            continue
        chunks = torch.arange(-(-stored // chunk), device=q.device)
        page = bounds.table[int(sequence[row]), head, chunks // slots].long()
        low, high = read_pages(bounds.pages, page, chunks % slots)
        logits = _chunk_logits(q[row, head].float(), low, high, channels)
        tokens = torch.arange(stored, device=q.device)
        weights = torch.softmax(logits[:, tokens // chunk], -1).mean(0)
        best = torch.sort(weights.flip(0), descending=True, stable=True).indices[:count]
        kept = (stored - 1 - best).sort().values
        answer[row, head, : kept.shape[0]] = kept.to(torch.int32)
    return answer


def _chunk_logits(
    q: torch.Tensor, low: torch.Tensor, high: torch.Tensor, channels: int
) -> torch.Tensor:
    """[group, chunks] from q [group, head_dim] and bounds [chunks, head_dim]."""
    size = q.abs()
    # Summed member by member: what is equal here is then equal in every body.
    strength, direction = torch.zeros_like(q[0]), torch.zeros_like(q[0])
    for member in q:
        strength, direction = strength + member.abs(), direction + member
    top = torch.sort(strength, descending=True, stable=True).indices[:channels]
    corner = torch.where(direction > 0, high, low)[:, top]
    tiny = torch.finfo(torch.float32).tiny  # a query of zeros has no share: its logits stay 0
    share = size[:, top].sum(-1) / size.sum(-1).clamp(min=tiny)
    return (q[:, top] @ corner.T) / (q.shape[-1] * share).clamp(min=tiny).sqrt()[:, None]
