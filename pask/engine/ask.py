"""Asks a method of the registry; whatever it raises becomes one line that says who and where."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pask.errors import HarnessFault
from pask.methods.contract import (
    Captures,
    Decoded,
    Method,
    Placement,
    PromptInfo,
    RequestState,
    SlotChoice,
    Wants,
)
from pask.methods.levels import CHANNEL_GROUP, Level


@contextmanager
def _one_line(who: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise HarnessFault(
            f"the method failed: {type(error).__name__}: {error}",
            where=who,
            why=f"at {Path(line.filename).name}:{line.lineno}",
            todo="mend the method; baselines/README.md has the contract",
        ) from error


def opened(method: Method, info: PromptInfo, who: str) -> RequestState:
    """The method's state for a request; `who` names entry and row. HarnessFault if it fails."""
    with _one_line(who):
        state = method.open(info)
        if not isinstance(state, RequestState) or not isinstance(state.wants, Wants):
            raise TypeError("open must answer a RequestState, whose wants are Wants")
        _check_numbers(state, info)
        if not isinstance(state.notes, tuple) or not all(isinstance(n, str) for n in state.notes):
            raise TypeError("a state's notes are a tuple of texts")
        if not isinstance(state.levels, frozenset) or not all(
            isinstance(level, Level) and level.is_low for level in state.levels
        ):
            raise TypeError("a state's levels are a frozenset of low Levels")
        ways = [state.acts_on_tokens or bool(state.levels), state.evicts, state.choice is not None]
        if sum(ways) > 1:
            raise ValueError("a state acts on tokens, evicts or has a choice, not two of these")
        if type(state.channel_keys) is not bool:
            raise TypeError(f"channel_keys is {state.channel_keys!r}, not True or False")
        if state.channel_keys and state.shifted_keys:
            raise ValueError("a state with channel_keys stores them plain: shifted_keys is False")
        if state.wants.step_mass and not state.evicts:
            raise ValueError("step_mass is for states that evict")
    return state


def _check_numbers(state: RequestState, info: PromptInfo) -> None:
    for what, number, least in (
        ("recent", state.recent, -1),
        ("window_queries", state.wants.window_queries, 0),
    ):
        if type(number) is not int or number < least:
            raise TypeError(f"{what} is {number!r}, not an int of at least {least}")
    choice = state.choice
    if choice is None:
        return
    if not isinstance(choice, SlotChoice):
        raise TypeError("a state's choice is a SlotChoice or None")
    if not all(type(n) is int for n in (choice.chunk, choice.channels, choice.count)):
        raise TypeError("chunk, channels and count of a SlotChoice are ints")
    if choice.channels > info.head_dim:
        raise ValueError(f"{choice.channels} channels, head_dim is {info.head_dim}")


def placement(
    state: RequestState, layer: int, captures: Captures, info: PromptInfo, who: str
) -> Placement:
    """Where a layer's prompt tokens stay, checked against the contract.

    HarnessFault where the method fails or breaks it.
    """
    with _one_line(f"{who}, layer {layer}"):
        answer = state.place(layer, captures)
        if not isinstance(answer, Placement):
            raise TypeError(f"place must answer Placement, not {type(answer).__name__}")
        answer.check(info, state.levels)
        groups = answer.tokens.get(Level.LOW2) if answer.tokens and state.channel_keys else None
        if groups is not None and groups.shape[1] % CHANNEL_GROUP:
            raise ValueError(
                f"{groups.shape[1]} LOW2 tokens, with channel_keys a multiple of {CHANNEL_GROUP}"
            )
        return answer


def levels_of(state: RequestState, decoded: Decoded, layers: int, who: str) -> tuple[Level, ...]:
    """The final level of a decoded token by layer, checked; HarnessFault as above."""
    with _one_line(f"{who}, token {decoded.index}"):
        levels = tuple(state.level_of(decoded))
        if len(levels) != layers:
            raise ValueError(f"level_of must answer {layers} levels, one a layer")
        allowed = state.levels | {Level.HIGH, Level.RELEASE}
        if state.channel_keys:
            allowed -= {Level.LOW2}
        strange = [level for level in levels if level not in allowed]
        if strange:
            raise ValueError(f"{strange[0]!r} is not among the levels of decoded tokens")
        return levels


def tell(state: RequestState, decoded: Decoded, who: str) -> None:
    """Tell a state of a decoded token; HarnessFault as above."""
    with _one_line(f"{who}, token {decoded.index}"):
        state.accepted(decoded)


def evicted(
    state: RequestState, tokens: int, mass: torch.Tensor | None, info: PromptInfo, who: str
) -> torch.Tensor | None:
    """What a state drops after a step, [layers, kv_heads, n] int64 or None; HarnessFault as above.

    That the tokens are resident is for the store to check.
    """
    with _one_line(f"{who}, after {tokens} tokens"):
        answer = state.evict(tokens, mass)
        if answer is None or (isinstance(answer, torch.Tensor) and not answer.numel()):
            return None
        shape = (info.layers, info.kv_heads)
        if (
            not isinstance(answer, torch.Tensor)
            or answer.dtype != torch.int64
            or tuple(answer.shape[:-1]) != shape
        ):
            raise TypeError(f"evict must answer int64 {list(shape)} + [n], or None")
        if bool((answer < 0).any()):
            raise ValueError("evict names a token below 0")
        return answer
