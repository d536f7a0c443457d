"""Reads a task's prompt once, exactly, and lets each of its methods place it in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import column_mass, window_mass
from kernels.paged import GROUP
from pask.engine.ask import opened, placement
from pask.engine.generation import Limits, Request, Task
from pask.engine.kv_seat import CHANNEL2, Pool, Seat
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel, ModelFiles
from pask.errors import PaskError
from pask.methods.contract import Captures, PromptInfo, RequestState, Wants
from pask.methods.levels import Level


@dataclass(frozen=True)
class Prepared:
    """A task whose methods have opened their states; nothing is computed yet."""

    task: Task
    info: PromptInfo
    states: tuple[RequestState, ...]

    @property
    def who(self) -> list[str]:
        """Entry and row of each state, as errors name them."""
        return [f"{entry}, row {self.task.request.id}" for entry, _ in self.task.methods]


def prepare(model: ModelFiles, task: Task, limits: Limits, page_slots: int) -> Prepared:
    """Check a task's request and open its methods' states.

    PaskError where the request does not fit the model, or a method needs levels that the model's
    head_dim rules out; HarnessFault where a method fails.
    """
    check_request(model, task.request, limits)
    layout = model.layout
    info = PromptInfo(
        prompt_tokens=len(task.request.prompt_ids),
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        group_size=layout.group_size,
        head_dim=layout.head_dim,
        expected_new_tokens=task.expected_new_tokens,
        page_slots=page_slots,
        labels=task.request.prompt_labels,
        texts=tuple(model.token_texts[token] for token in task.request.prompt_ids),
    )
    states = []
    for entry, method in task.methods:
        who = f"{entry}, row {task.request.id}"
        state = opened(method, info, who)
        if state.levels and info.head_dim % GROUP:
            raise PaskError(
                f"head_dim {info.head_dim} is no multiple of {GROUP}",
                where=who,
                why=f"low levels are quantised in groups of {GROUP} channels",
                todo=f"leave the method out for {model.name}",
            )
        states.append(state)
    return Prepared(task, info, tuple(states))


def room(
    state: RequestState, tokens: int, page_slots: int, *, prompt: bool = True
) -> dict[Pool, int]:
    """Slots of each pool, per layer and kv head, that `tokens` more tokens of a request can need:
    any of them may be at any of the state's levels. `prompt`: some are the prompt's."""
    high = tokens
    if state.acts_on_tokens:  # the ring of recent tokens lies in pages of its own
        high += min(state.recent + 1, tokens) + page_slots
    if state.choice is not None:
        high += -(-tokens // state.choice.chunk) + page_slots
    slots: dict[Pool, int] = {Level.HIGH: high, **dict.fromkeys(state.levels, tokens)}
    if state.channel_keys and Level.LOW2 in state.levels:
        del slots[Level.LOW2]
        slots[CHANNEL2] = tokens if prompt else 0
    return slots


def prefill(
    model: LoadedModel, prepared: Prepared, seats: Sequence[Seat], store: KVStore
) -> torch.Tensor:
    """Fill `seats` with the prompt, as each state places it; logits [vocab] of the last token.

    Methods that keep a whole layer share one copy of it. HarnessFault where a method breaks the
    contract; PaskError where the model's values do not fit the store's dtype.
    """
    states, who = prepared.states, prepared.who
    wants = [state.wants for state in states]

    def place(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        found = {want: _capture(want, q, k) for want in set(wants)}
        whole = []
        for state, seat, want, name in zip(states, seats, wants, who, strict=True):
            answer = placement(state, layer, _own(found[want]), prepared.info, name)
            if answer.tokens is None and not (state.levels or state.evicts or state.choice):
                whole.append(seat)
            else:
                store.add_prompt([seat], layer, k, v, answer)
        if whole:
            store.add_prompt(whole, layer, k, v, None)

    return model.transformer.prefill(prepared.task.request.prompt_ids, place)


def check_request(model: ModelFiles, request: Request, limits: Limits) -> None:
    """PaskError where a prompt does not fit the model, or its grammar another vocabulary."""
    prompt, layout = len(request.prompt_ids), model.layout
    if not prompt:
        raise PaskError("the prompt is empty", where=request.id)
    if prompt + limits.max_new_tokens > layout.max_positions:
        raise PaskError(
            f"{prompt} prompt tokens and up to {limits.max_new_tokens} new ones do not fit",
            where=request.id,
            why=f"{model.name} has {layout.max_positions} positions",
            todo="shorten the prompt or lower max_new_tokens",
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= layout.vocab_size:
        raise PaskError(
            "a prompt token is outside the vocabulary",
            where=request.id,
            why=f"{model.name} has ids 0..{layout.vocab_size - 1}",
        )
    known = request.grammar.tokenizer_info.vocab_size
    if known != layout.vocab_size:
        raise PaskError(
            f"the grammar was compiled for {known} tokens",
            where=request.id,
            why=f"{model.name} has {layout.vocab_size}",
            todo="compile it with tokenizer_info(model)",
        )


def _own(captures: Captures) -> Captures:
    """A copy for one method: what it does to the tensors in place is not seen by the next."""
    window, prompt = captures.window_mass, captures.prompt_mass
    return Captures(
        window_mass=None if window is None else window.clone(),
        prompt_mass=None if prompt is None else prompt.clone(),
    )


def _capture(want: Wants, q: torch.Tensor, k: torch.Tensor) -> Captures:
    return Captures(
        window_mass=window_mass(q, k, want.window_queries) if want.window_queries else None,
        prompt_mass=column_mass(q, k) if want.prompt_mass else None,
    )
