"""A method's state asked as the engine asks it, without a model: what it keeps, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pask.methods.contract import Captures, Decoded, PromptInfo, RequestState, Wants
from pask.methods.levels import CHANNEL_GROUP, Level
from tests.cpu.pask_policies import FAR_TAG, NEAR_TAG, UNSEEN_TAG, VALUE_TAG

Resident = tuple[tuple[tuple[tuple[int, Level], ...], ...], ...]
"""By layer and kv head: (token, level) of what is resident, ascending."""


def walk(state: RequestState, info: PromptInfo, seed: int, steps: int = 20) -> Iterator[Resident]:
    """Ask a state as the engine does, with attention masses drawn by `seed`, and check its answers.

    Yields what is resident after the prefill's last layer (before that, layer by layer) and after
    every decode step.
    """
    draw = torch.Generator().manual_seed(seed)
    held: list[list[dict[int, Level]]] = []
    for layer in range(info.layers):
        placed = state.place(layer, _captures(state.wants, info, draw))
        placed.check(info, state.levels)
        tokens = placed.tokens
        if tokens is None:
            tokens = {Level.HIGH: torch.arange(info.prompt_tokens).expand(info.kv_heads, -1)}
        if state.channel_keys and Level.LOW2 in tokens:
            assert tokens[Level.LOW2].shape[1] % CHANNEL_GROUP == 0
        held.append(
            [
                {int(token): level for level, rows in tokens.items() for token in rows[head]}
                for head in range(info.kv_heads)
            ]
        )
        yield _snapshot(held)
    for step in range(steps):
        _decode(state, info, held, step, draw)
        yield _snapshot(held)


def _captures(wants: Wants, info: PromptInfo, draw: torch.Generator) -> Captures:
    size = (info.kv_heads * info.group_size, info.prompt_tokens)
    return Captures(
        window_mass=torch.rand(size, generator=draw) if wants.window_queries else None,
        prompt_mass=torch.rand(size, generator=draw) if wants.prompt_mass else None,
    )


def _decode(
    state: RequestState,
    info: PromptInfo,
    held: list[list[dict[int, Level]]],
    step: int,
    draw: torch.Generator,
) -> None:
    token = info.prompt_tokens + step
    levels = [Level.HIGH] * info.layers
    if state.acts_on_tokens:
        text = (b'"', b"city", b": ", b"Rome")[step % 4]
        tag = (NEAR_TAG, VALUE_TAG, FAR_TAG, UNSEEN_TAG)[(step + step // 4) % 4]
        levels = list(state.level_of(Decoded(step, 10 + step % 7, text, tag)))
        assert len(levels) == info.layers
        assert set(levels) <= state.levels | {Level.HIGH, Level.RELEASE}
        assert not (state.channel_keys and Level.LOW2 in levels)
    for layer, level in zip(held, levels, strict=True):
        for head in layer:
            if level is not Level.RELEASE:
                head[token] = level
    if not state.evicts:
        return
    mass = None
    if state.wants.step_mass:
        mass = torch.rand(info.layers, info.kv_heads, token + 1, generator=draw)
        for layer, heads in enumerate(held):
            for head, resident in enumerate(heads):
                gone = [t for t in range(token + 1) if t not in resident]
                mass[layer, head, gone] = 0.0
    dropped = state.evict(token + 1, mass)
    if dropped is None:
        return
    assert dropped.dtype == torch.int64
    assert dropped.shape[:2] == (info.layers, info.kv_heads)
    for heads, rows in zip(held, dropped.tolist(), strict=True):
        for resident, gone in zip(heads, rows, strict=True):
            assert len(set(gone)) == len(gone)
            assert token not in gone, "the newest token was dropped"
            for one in gone:
                del resident[one]  # KeyError: it was not resident


def _snapshot(held: list[list[dict[int, Level]]]) -> Resident:
    return tuple(tuple(tuple(sorted(head.items())) for head in layer) for layer in held)
