"""A known answer under Full KV, with everything that judging other policies on it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import xgrammar as xgr

from pask.engine.constraint import LegalTokens, best
from pask.engine.generation import Limits, Request, Task
from pask.engine.kv_plan import Run
from pask.engine.kv_seat import Seat
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel
from pask.engine.prefill import Prepared, prefill, prepare
from pask.errors import HarnessFault, PaskError
from pask.methods.contract import Decoded
from pask.methods.full import FullKV
from pask.structure.tracker import Tracker


@dataclass(frozen=True)
class Trace:
    """One pass of the model over a request and its answer, every token at HIGH.

    `tokens`: the answer without the stop token; `ended`: whether a stop token followed it.
    `prompt`: a seat that holds the whole prompt. Per layer, for the `fed` tokens whose KV an answer
    like this leaves behind: `inputs` [fed, hidden], `keys` and `values` [fed, kv_heads, head_dim],
    `outputs` of attention [fed, q_heads, head_dim], fp32. Choice i is that of token i (the last one
    is the stop token's); `masks[i]` is its bitmask, None where the grammar leaves one token;
    `chosen[i]` is what the model chooses there, the forced token where there is one. It may differ
    from a token that another engine wrote.
    """

    request: Request
    expected_new_tokens: int
    tokens: tuple[int, ...]
    ended: bool
    limit: int  # new tokens at most, as it was written
    decoded: tuple[Decoded, ...]
    prompt: Seat
    inputs: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor | None, ...]
    chosen: tuple[int, ...]
    token_layers: int  # forwarded for this trace, its prompt included

    @property
    def fed(self) -> int:
        return len(self.masks) - 1


@torch.inference_mode()
def record_trace(
    model: LoadedModel,
    store: KVStore,
    vocabulary: Sequence[bytes],
    request: Request,
    tokens: Sequence[int],
    limits: Limits,
    *,
    expected_new_tokens: int = 0,
) -> Trace:
    """Read a request and the answer `tokens` (without a stop token) in two passes.

    An answer of `limits.max_new_tokens` tokens was cut off there; a shorter one has ended. The
    prompt stays in the store until the trace's `prompt` seat is freed. PaskError where the request
    does not fit the model, or the grammar does not allow the answer.
    """
    task = Task(request, (("full", FullKV()),), expected_new_tokens)
    prepared = prepare(model, task, limits, store.page_slots)
    ended = len(tokens) < limits.max_new_tokens
    if len(tokens) > limits.max_new_tokens:
        raise PaskError(
            f"an answer of {len(tokens)} tokens, more than {limits.max_new_tokens}",
            where=request.id,
            todo="use the max_new_tokens that it was written with",
        )
    masks, only = _choices(model, request, tokens, ended)
    decoded = decoded_tokens(vocabulary, request, tokens)
    seat = store.open(prepared.info.prompt_tokens)
    try:
        return _read(model, store, prepared, seat, decoded, limits, masks, only)
    except BaseException:
        with suppress(ValueError):  # of a step that broke off
            store.free(seat)
        raise


def _read(
    model: LoadedModel,
    store: KVStore,
    prepared: Prepared,
    seat: Seat,
    decoded: Sequence[Decoded],
    limits: Limits,
    masks: Sequence[torch.Tensor | None],
    only: Sequence[int],
) -> Trace:
    """The two passes: the prompt into `seat`, and the answer behind it."""
    first = prefill(model, prepared, [seat], store)
    tokens = [one.token_id for one in decoded]
    fed = tokens[: len(masks) - 1]
    saved: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    logits = first[None]
    if fed:
        fork = store.fork(seat)
        step = store.begin([Run(fork, None, len(fed))])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys.append(k.contiguous())
            values.append(v.contiguous())
            outputs.append(step.attend(layer, q, k, v))
            return outputs[-1]

        start = prepared.info.prompt_tokens
        x = model.transformer.forward(
            model.transformer.embed(fed),
            range(start, start + len(fed)),
            attend,
            saved=lambda _, given: saved.append(given),
        )
        step.finish()
        store.free(fork)
        open_rows = [row for row in range(len(fed)) if masks[row + 1] is not None]
        logits = torch.cat((logits, model.transformer.logits(x[open_rows])))
        open_choices = [0, *(row + 1 for row in open_rows)]
    else:
        open_choices = [0]
    rows = [n for n, choice in enumerate(open_choices) if masks[choice] is not None]
    who = [prepared.who[0]] * len(rows)
    picked = best([m for m in masks if m is not None], logits[rows], who) if rows else []
    chosen = list(only)
    for n, token in zip(rows, picked, strict=True):
        chosen[open_choices[n]] = token
    return Trace(
        request=prepared.task.request,
        expected_new_tokens=prepared.info.expected_new_tokens,
        tokens=tuple(tokens),
        ended=len(tokens) < limits.max_new_tokens,
        limit=limits.max_new_tokens,
        decoded=tuple(decoded),
        prompt=seat,
        inputs=tuple(saved),
        keys=tuple(keys),
        values=tuple(values),
        outputs=tuple(outputs),
        masks=tuple(masks),
        chosen=tuple(chosen),
        token_layers=(prepared.info.prompt_tokens + len(fed)) * prepared.info.layers,
    )


def _choices(
    model: LoadedModel, request: Request, tokens: Sequence[int], ended: bool
) -> tuple[list[torch.Tensor | None], list[int]]:
    """The mask of each choice (None: forced), and the token where it is forced (else -1)."""
    matcher = xgr.GrammarMatcher(request.grammar)
    masks: list[torch.Tensor | None] = []
    only: list[int] = []
    for choice in range(len(tokens) + ended):
        legal = LegalTokens([matcher], model.layout.vocab_size)
        forced = legal.counts[0] == 1
        masks.append(None if forced else legal.mask(0))
        only.append(legal.only(0) if forced else -1)
        if choice < len(tokens) and not matcher.accept_token(tokens[choice]):
            raise PaskError(
                f"the grammar does not allow token {choice} of the answer",
                where=request.id,
                todo="give an answer that was written under this grammar",
            )
        if matcher.is_terminated():
            raise PaskError(
                f"token {choice} of the answer is a stop token",
                where=request.id,
                todo="leave stop tokens out",
            )
    if ended and not matcher.is_completed():
        raise PaskError(
            f"the answer breaks off after {len(tokens)} tokens",
            where=request.id,
            todo="use the max_new_tokens that it was written with",
        )
    return masks, only


def decoded_tokens(
    vocabulary: Sequence[bytes], request: Request, tokens: Sequence[int]
) -> tuple[Decoded, ...]:
    """An answer's tokens as methods see them; HarnessFault where the tag grammar refuses one."""
    tracker = Tracker(request.tag_grammar) if request.tag_grammar else None
    decoded = []
    for number, token in enumerate(tokens):
        text = vocabulary[token]
        try:
            tag = tracker.accept(text) if tracker else None
        except ValueError as error:
            raise HarnessFault(
                f"the tag grammar refused {text!r}, which the grammar had accepted",
                where=request.id,
                why=str(error),
            ) from error
        decoded.append(Decoded(number, token, text, tag))
    return tuple(decoded)
