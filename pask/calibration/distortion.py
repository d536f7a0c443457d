"""D(q, a): what attention's output loses when one bucket is at another level (Equation 4).

    D(q, a) = sum_{l in c} E_{S(q)} [ max_h || o_full[l, r, u, h] - o_a(q)[l, r, u, h] ||_2^2 ]

over a reference trace r, layers l of the bucket's group c, positions u and query heads h. Each
layer attends with the reference's own queries, keys and values, among which the bucket's tokens
alone are changed. So a change in a lower layer of the group is not felt in a higher one: the
distortion is local. Equation 4 can be read otherwise too, with the intervention running through the
group's layers: `pask.calibration.sensitivity` measures that where it replays the intervention.

What is changed is what the store would change. A low token is quantised from its 16 bit, its keys
freed of the prompt's channel statistics; a released one is left out of the softmax. A position is
the query of a token of the answer that is fed, whose output leads to the choice of the next one.

- Side "decode": tokens of the answer, by the names of their tags' buckets. Position u reads token t
  at its final level once t has left the recent window: t < u - recent. S(q) are the positions
  that read at least one such token.
- Side "prompt": tokens of the prompt, by the values of their labels, without those that stay at
  HIGH whatever their label: the first `sinks` and the last one. The prefill is exact, and with it
  the choice of the first token; S(q) are all positions after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels.reference.codes import dequantise, quantise
from pask.calibration.answer_attention import Part, squared_change, without_each
from pask.engine.kv_seat import KVShape
from pask.engine.kv_statistics import KeyStatistics
from pask.engine.kv_store import KVStore
from pask.engine.kv_values import rounded
from pask.engine.loading import LoadedModel
from pask.engine.trace import Trace
from pask.methods.levels import Level
from pask.structure.buckets import LayerBucket, bucket_name, layer_groups

DECODE, PROMPT = "decode", "prompt"

SIDES = (DECODE, PROMPT)

_POSITIONS = 64
"""Positions that attend together: bounds the memory to so many rows of scores per query head."""

_Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass(frozen=True)
class Distorted:
    """One row's share of D(q, a): over rows, sum of `total` / sum of `positions`.

    `tokens` of the row are the bucket's; `positions` is |S(q)|; `total` is the sum over S(q) and
    the group's layers of the worst query head's squared change.
    """

    side: str
    bucket: LayerBucket
    level: Level
    tokens: int
    positions: int
    total: float


@torch.inference_mode()
def distortions(
    model: LoadedModel,
    store: KVStore,
    trace: Trace,
    *,
    groups: int | tuple[int, ...],
    coarsening: str,
    recent: int,
    ladder: Sequence[Level],
    sinks: int = 0,
    sides: Sequence[str] = SIDES,
) -> tuple[Distorted, ...]:
    """Every bucket that a trace has, in every layer group, at every level of `ladder`.

    Side by side as asked for; names in the order in which they first occur, then groups, then the
    ladder. Tokens of the answer that were not fed leave no KV and are not counted; an answer of
    which nothing was fed has no position. HIGH changes nothing. `groups`, `coarsening` and `recent`
    mean what they mean to `OneBucket`; `trace.prompt` must be in `store` still.

    ValueError for another side, a trace without the tags or the labels that its side needs, a
    window below -1, and a prompt that was freed; PaskError for an unknown coarsening or groups that
    the model cannot have.
    """
    if store.seats[trace.prompt.id] is not trace.prompt:
        raise ValueError("the trace's prompt was freed")
    if recent < -1:
        raise ValueError(f"a recent window of {recent} tokens: it is -1 at least")
    of_group = layer_groups(model.layout.layers, groups)
    members = {side: _members(trace, side, coarsening, sinks) for side in sides}
    totals = {
        side: torch.zeros(len(of_group), len(ladder), len(names), dtype=torch.float64)
        for side, names in members.items()
    }
    for group, layers in enumerate(of_group):
        for layer in layers if trace.fed else ():
            read = _Layer.of(model, store, trace, layer, ladder)
            for side, names in members.items():
                if names:
                    totals[side][group] += read.changes(side, list(names.values()), recent, ladder)
    return tuple(
        Distorted(
            side,
            LayerBucket(name, group),
            level,
            tokens=len(tokens),
            positions=affected(side, int(tokens[0]), trace.fed, recent),
            total=float(totals[side][group, step, number]),
        )
        for side, names in members.items()
        for number, (name, tokens) in enumerate(names.items())
        for group in range(len(of_group))
        for step, level in enumerate(ladder)
    )


def _members(trace: Trace, side: str, coarsening: str, sinks: int) -> Mapping[str, torch.Tensor]:
    """Which tokens of its side each name has, [n] int64, ascending from 0."""
    names: list[str] = []
    first = 0
    if side == DECODE:
        for decoded in trace.decoded[: trace.fed]:
            if decoded.tag is None:
                raise ValueError("a bucket is made of tags, and the request has no tag grammar")
            names.append(bucket_name(decoded.tag, coarsening))
    elif side == PROMPT:
        labels = trace.request.prompt_labels
        if labels is None or len(labels) != trace.prompt.prompt_tokens:
            raise ValueError("a prompt's buckets are its labels, and not every token has one")
        names += [label.value for label in labels[sinks:-1]]
        first = sinks
    else:
        raise ValueError(f"a side is one of {SIDES}, not {side!r}")
    found: dict[str, list[int]] = {}
    for number, name in enumerate(names, start=first):
        found.setdefault(name, []).append(number)
    return {name: torch.tensor(numbers) for name, numbers in found.items()}


def affected(side: str, first: int, fed: int, recent: int) -> int:
    """|S(q)|: with the first of its tokens out of the window a bucket is felt to the end."""
    return fed if side == PROMPT else max(fed - first - recent - 1, 0)


@dataclass(frozen=True)
class _Layer:
    """A layer of a trace: scaled queries [fed, q_heads, head_dim] of the answer; keys and values
    [kv_heads, n, head_dim] of the prompt and the answer, as 16 bit holds them and, by level, as
    low pages do. All fp32."""

    queries: torch.Tensor
    high: Mapping[str, _Pair]
    low: Mapping[tuple[str, Level], _Pair]

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        store: KVStore,
        trace: Trace,
        layer: int,
        ladder: Sequence[Level],
    ) -> _Layer:
        prompt = trace.prompt.prompt_tokens
        queries, _, _ = model.transformer.project(
            layer, trace.inputs[layer], range(prompt, prompt + trace.fed)
        )
        # A prompt that is whole lies in the order of its tokens.
        _, prompt_keys, prompt_values = store.dense(trace.prompt, layer)["high"]
        answer_keys, answer_values = (
            rounded(layer, part[layer], store.dtype).transpose(0, 1).float()
            for part in (trace.keys, trace.values)
        )
        statistics = KeyStatistics(
            KVShape(1, prompt_keys.shape[0], prompt_keys.shape[2]), 1, prompt_keys.device
        )
        statistics.measure(0, [0], prompt_keys)
        shift = statistics.shift(0)
        center, spread = (part[0, :, None].float() for part in (shift.center, shift.spread))
        high = {
            PROMPT: (prompt_keys.float(), prompt_values.float()),
            DECODE: (answer_keys, answer_values),
        }
        low = {
            (side, level): (
                dequantise(*quantise((keys - center) / spread, level)) * spread + center,
                dequantise(*quantise(values, level)),
            )
            for side, (keys, values) in high.items()
            for level in ladder
            if level.is_low
        }
        return cls(queries * queries.shape[2] ** -0.5, high, low)

    def changes(
        self, side: str, names: Sequence[torch.Tensor], recent: int, ladder: Sequence[Level]
    ) -> torch.Tensor:
        """[levels, names] fp64: the worst head's squared change, summed over positions."""
        found = torch.zeros(len(ladder), len(names), dtype=torch.float64)
        for start in range(0, len(self.queries), _POSITIONS):
            rows = slice(start, min(start + _POSITIONS, len(self.queries)))
            found += self._changes(side, names, recent, ladder, rows)
        return found

    def _changes(
        self,
        side: str,
        names: Sequence[torch.Tensor],
        recent: int,
        ladder: Sequence[Level],
        rows: slice,
    ) -> torch.Tensor:
        """`changes` of some positions."""
        count, q_heads, head_dim = self.queries[rows].shape
        kv_heads = self.high[PROMPT][0].shape[0]
        # Within a kv head, row g * count + n is query head g at position n.
        queries = self.queries[rows].view(count, kv_heads, -1, head_dim)
        queries = queries.permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
        group_size = q_heads // kv_heads

        at = torch.arange(rows.start, rows.stop)[:, None]
        token = torch.arange(len(self.queries))
        causal = (token <= at).repeat(group_size, 1)
        left = (token < at - recent).repeat(group_size, 1)  # out of the window
        answer_keys, answer_values = self.high[DECODE]
        prompt_keys, prompt_values = self.high[PROMPT]
        seen = left if side == DECODE else None
        mask = causal & ~left if side == DECODE else causal
        if side == PROMPT:
            stay = torch.ones(prompt_keys.shape[1], dtype=torch.bool)
            stay[torch.cat(list(names))] = False
            prompt_keys, prompt_values = prompt_keys[:, stay], prompt_values[:, stay]
        answer_scores = _masked(queries @ answer_keys.transpose(1, 2), mask)
        scores = torch.cat((queries @ prompt_keys.transpose(1, 2), answer_scores), -1)
        fixed = Part.over(scores, torch.cat((prompt_values, answer_values), 1))

        before = _by_name(queries, self.high[side], names, seen)
        rest = without_each(before.and_also(fixed), len(names))
        found = torch.zeros(len(ladder), len(names), dtype=torch.float64)
        for number, level in enumerate(ladder):
            if level is Level.HIGH:
                continue
            after = None
            if level.is_low:
                after = _by_name(queries, self.low[side, level], names, seen)
            change = squared_change(rest, before, after)  # [names, kv_heads, rows]
            worst = change.view(len(names), q_heads, count).amax(1)
            found[number] = worst.double().sum(-1)
        return found


def _by_name(
    queries: torch.Tensor,
    stored: _Pair,
    names: Sequence[torch.Tensor],
    seen: torch.Tensor | None,
) -> Part:
    """Attention over each name's tokens alone, stacked: lse [names, kv_heads, rows].

    `seen` [rows, n] bool: which of them a row reads at this level; None: all.
    """
    order, sizes = torch.cat(list(names)), [len(tokens) for tokens in names]
    keys, values = (part[:, order] for part in stored)  # each name's tokens side by side
    scores = queries @ keys.transpose(1, 2)
    if seen is not None:
        scores = _masked(scores, seen[:, order])
    own = zip(torch.split(scores, sizes, dim=-1), torch.split(values, sizes, dim=1), strict=True)
    return Part.stacked([Part.over(*pair) for pair in own])


def _masked(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~seen, float("-inf"))
