"""What decoding takes and gives: requests with their methods, limits, answers and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import xgrammar as xgr

from pask.methods.contract import Method
from pask.structure.automaton import TagGrammar
from pask.structure.labels import Label
from pask.structure.tags import Tag

MAX_ENTRIES = 64
"""Methods that one task may hold; they are prefilled together."""


class Request(Protocol):
    """What decoding needs to know of a request."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def prompt_labels(self) -> Sequence[Label] | None:
        """What each prompt token is for; None: the prompt is not labelled."""

    @property
    def grammar(self) -> xgr.CompiledGrammar: ...

    @property
    def tag_grammar(self) -> TagGrammar | None:
        """The same texts as `grammar`; None: the answer is not tagged."""


@dataclass(frozen=True)
class Task:
    """A request and the methods that answer it, each under an entry name of its own.

    `expected_new_tokens` is the mean answer length of such requests, which methods plan with.
    """

    request: Request
    methods: tuple[tuple[str, Method], ...]
    expected_new_tokens: int = 0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.methods]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{self.request.id}: entry names must be there and differ: {names}")
        if len(names) > MAX_ENTRIES:
            raise ValueError(f"{self.request.id}: {len(names)} entries, at most {MAX_ENTRIES}")


@dataclass(frozen=True)
class Limits:
    """A generation ends with the grammar's stop token, or after `max_new_tokens` choices.

    The stop token, legal only where the grammar is complete, counts as a choice.
    """

    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError("max_new_tokens must be at least 1")


@dataclass(frozen=True)
class ByteCounts:
    """Bytes of one generation's KV store, counted from the tensors that existed.

    `prompt`, `decode`, `full`: at the end of the request, and what Full KV would hold then, of
    which `full_prompt` for the prompt.
    `resident_sum`, `full_sum`: the same two totals, each summed over the choices of a token (the
    stop token too), as they stood at that choice; the first choice sees the prompt's KV alone.
    `read_sum`: what attention read for the same choices (`pask.engine.kv_traffic`); all that is
    resident, unless the method reads by a `SlotChoice`.
    """

    prompt: int
    decode: int
    full: int
    full_prompt: int
    resident_sum: int
    read_sum: int
    full_sum: int


@dataclass(frozen=True)
class Generation:
    """One request's answer under one entry."""

    request_id: str
    entry: str
    token_ids: tuple[int, ...]  # without the stop token
    text: str
    finish: Literal["stop", "length"]
    prompt_tokens: int
    bytes: ByteCounts
    notes: tuple[str, ...]  # what the method says of this request
    tags: tuple[Tag, ...]  # one a token, or none at all where the request has no tag grammar

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)
