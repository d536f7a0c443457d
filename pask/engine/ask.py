"""Asks a method of the registry; whatever it raises becomes one line that says who and where."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pask.errors import HarnessFault
from pask.methods.contract import Captures, Keep, Method, PromptInfo, RequestState, Wants


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
        if not isinstance(state.notes, tuple) or not all(isinstance(n, str) for n in state.notes):
            raise TypeError("a state's notes are a tuple of texts")
    return state


def kept_tokens(
    state: RequestState, layer: int, captures: Captures, info: PromptInfo, who: str
) -> torch.Tensor | None:
    """The prompt tokens that stay in a layer, [kv_heads, kept] int64 or None for all of them.

    Checked against the contract; HarnessFault where the method fails or breaks it.
    """
    with _one_line(f"{who}, layer {layer}"):
        keep = state.keep(layer, captures)
        if not isinstance(keep, Keep):
            raise TypeError(f"keep must answer Keep, not {type(keep).__name__}")
        keep.check(info)
        return keep.tokens
