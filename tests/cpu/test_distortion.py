"""Distortion of answers against attention written out in float64, and against the engine itself."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pask.calibration.distortion import Distorted, distortions
from pask.calibration.intervention import OneBucket
from pask.engine.decode import generate, new_store
from pask.engine.generation import Limits, Task
from pask.engine.kv_plan import Run
from pask.engine.kv_seat import Seat
from pask.engine.kv_store import KVStore
from pask.engine.loading import LoadedModel, load_model
from pask.engine.replay_job import lay, prepared_for
from pask.engine.trace import Trace, record_trace
from pask.errors import PaskError
from pask.methods.contract import Placement
from pask.methods.levels import Level
from pask.structure.buckets import LayerBucket, bucket_name, layer_groups
from pask.structure.labels import Label
from pask.structure.tags import Choice, Next, Tag, tag
from tests.cpu.tiny import LAYOUTS, tiny_folder
from tests.cpu.toys import full, toy_requests

LIMITS = Limits(24)
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32
LADDER = (Level.RELEASE, Level.LOW2, Level.LOW4, Level.LOW8, Level.HIGH)
COARSENING = "role_choice_next"
SINKS = 2

# By rank in CONSEQUENCE: a function's name, a required key, punctuation of an argument, layout.
TAGS = tuple(
    tag(rank, False, False, choice, Next.FAR)
    for rank, choice in ((0, Choice.FREE), (17, Choice.FORCED), (21, Choice.FORCED))
)
LABELS = (Label.USER, Label.TYPE, Label.TOOL_SCAFFOLD, Label.CHAT_SCAFFOLD)


@dataclass(frozen=True)
class Case:
    """A trace with the tags and labels given to it, and what a real pass showed of each layer:
    q [fed, q_heads, head_dim], k and v [fed, kv_heads, head_dim] before they are stored."""

    model: LoadedModel
    store: KVStore
    trace: Trace
    seen: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]
    decoded: torch.Tensor  # what the top layer's attention gave, token by token

    def found(
        self, recent: int, groups: int | tuple[int, ...] = LAYERS, coarsening: str = COARSENING
    ) -> dict[tuple[str, LayerBucket, Level], Distorted]:
        all_found = distortions(
            self.model,
            self.store,
            self.trace,
            groups=groups,
            coarsening=coarsening,
            recent=recent,
            ladder=LADDER,
            sinks=SINKS,
        )
        by_key = {(one.side, one.bucket, one.level): one for one in all_found}
        assert len(by_key) == len(all_found)
        return by_key

    @property
    def names(self) -> dict[str, list[str]]:
        """The name of each token, by side; none of a prompt's that always stay as they are."""
        fed = self.trace.decoded[: self.trace.fed]
        labels = self.trace.request.prompt_labels or ()
        return {
            "decode": [bucket_name(one.tag, COARSENING) for one in fed if one.tag],
            "prompt": [""] * SINKS + [label.value for label in labels[SINKS:-1]] + [""],
        }


def some_tags(count: int, seed: int) -> list[Tag]:
    """Random ones; the last five are layout, which a window of five never lets go."""
    draw = random.Random(seed)
    tags = [draw.choice(TAGS) for _ in range(count - 5)]
    return tags + [tag(23, False, False, Choice.FORCED, Next.FAR)] * 5


@torch.inference_mode()
def watched(model: LoadedModel, store: KVStore, seat: Seat, trace: Trace, runs: Sequence[Run]):  # type: ignore[no-untyped-def]
    """Feed a trace's tokens in `runs`; by layer, what attention took and gave."""
    layers: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(model.layout.layers)]
    for run in runs:
        step = store.begin([run])

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: object = step
        ) -> torch.Tensor:
            out = step.attend(layer, q, k, v)  # type: ignore[attr-defined]
            layers[layer].append((q.clone(), k.clone(), v.clone(), out.clone()))
            return out  # type: ignore[no-any-return]

        tokens = trace.tokens[seat.decoded : seat.decoded + run.length]
        positions = range(seat.position, seat.position + run.length)
        model.transformer.forward(model.transformer.embed(tokens), positions, attend)
        step.finish()
    return [tuple(torch.cat(parts) for parts in zip(*steps, strict=True)) for steps in layers]


@pytest.fixture(scope="module", params=LAYOUTS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("model")
    shape = {"head_dim": HEAD_DIM, "num_hidden_layers": LAYERS}
    model = load_model(str(tiny_folder(folder, request.param, seed=3, **shape)))
    store = new_store(model, seats=24, capacity_tokens=8192)
    requests = toy_requests(model)[3:9]
    answers = {one.request_id: one for one in generate(model, full(requests), LIMITS)}
    subject = max(requests, key=lambda one: answers[one.id].new_tokens)
    answer = answers[subject.id]
    draw = random.Random(11)
    labels = tuple(draw.choice(LABELS) for _ in subject.prompt_ids)
    subject = replace(subject, prompt_labels=labels)
    trace = record_trace(model, store, model.token_texts, subject, answer.token_ids, LIMITS)
    assert trace.fed >= 16
    tags = some_tags(trace.fed, 5) + [TAGS[0]] * (len(trace.tokens) - trace.fed)
    decoded = tuple(replace(one, tag=z) for one, z in zip(trace.decoded, tags, strict=True))
    trace = replace(trace, decoded=decoded)
    seat = store.fork(trace.prompt)
    seen = watched(model, store, seat, trace, [Run(seat, None, trace.fed)])
    store.free(seat)
    seat = store.fork(trace.prompt)
    decoded = watched(model, store, seat, trace, [Run(seat, None, 1)] * trace.fed)[-1][3]
    store.free(seat)
    yield Case(model, store, trace, tuple(parts[:3] for parts in seen), decoded)
    store.free(trace.prompt)
    store.check()


# The oracle


def through_codes(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers [..., 32 n] fp32 through codes of so many bits, group by group."""
    top = torch.tensor(2.0**bits - 1)
    out = x.clone()
    for at in range(0, x.shape[-1], 32):
        group = x[..., at : at + 32]
        low, high = group.min(-1, keepdim=True).values, group.max(-1, keepdim=True).values
        scale, zero = ((high - low) / top).half().float(), low.half().float()
        codes = ((group - zero) / scale).round().clamp(0, float(top))
        out[..., at : at + 32] = codes * scale + zero
    return out


def plain_totals(
    case: Case, side: str, name: str, layer: int, level: Level, recent: int
) -> tuple[int, float]:
    """Positions and their sum in one layer: by position and head, one whole softmax each."""
    prompt, fed = case.trace.prompt.prompt_tokens, case.trace.fed
    q, k, v = case.seen[layer]
    stored = case.store.dense(case.trace.prompt, layer)["high"]
    keys, values = (
        torch.cat((of_prompt.float(), part.half().float().transpose(0, 1)), 1)
        for of_prompt, part in zip(stored[1:], (k, v), strict=True)
    )  # [kv_heads, prompt + fed, head_dim]
    low_keys, low_values = keys, values
    if level.is_low:
        seat = case.store.place(case.trace.prompt, None, levels=frozenset({level}))
        shift = case.store.statistics.shift(layer)
        center, spread = (p[seat.id, :, None].float() for p in (shift.center, shift.spread))
        case.store.free(seat)
        low_keys = through_codes((keys - center) / spread, level) * spread + center
        low_values = through_codes(values, level)
    positions, total = 0, 0.0
    for u in range(fed):
        if side == "prompt":
            mine = {t for t in range(prompt) if case.names[side][t] == name}
        else:  # with `recent` more after it than this one, a token is beyond the window
            gone = range(0, u - recent)
            mine = {prompt + t for t in gone if case.names[side][t] == name}
        positions += bool(mine)
        worst = 0.0
        for head in range(Q_HEADS):
            own = head // (Q_HEADS // KV_HEADS)
            outputs = []
            end = prompt + u + 1
            for changed in (set(), mine):
                lowered = torch.tensor([j in changed for j in range(end)])
                key, value = (
                    torch.where(lowered[:, None], low[own, :end], high[own, :end]).double()
                    for low, high in ((low_keys, keys), (low_values, values))
                )
                if level is Level.RELEASE:
                    key, value = key[~lowered], value[~lowered]
                scores = key @ q[u, head].double() / HEAD_DIM**0.5
                outputs.append(scores.softmax(0) @ value)
            worst = max(worst, float((outputs[0] - outputs[1]).square().sum()))
        total += worst
    return positions, total


@pytest.mark.parametrize("level", LADDER[:-1])
@pytest.mark.parametrize(("side", "recent"), [("decode", 5), ("prompt", 5), ("decode", -1)])
def test_every_bucket_is_what_plain_attention_says(
    case: Case, side: str, recent: int, level: Level
) -> None:
    layer = {Level.RELEASE: 0, Level.LOW2: 1, Level.LOW4: 2, Level.LOW8: 1}[level]
    found = case.found(recent)
    names = set(case.names[side]) - {""}
    assert len(names) == 4
    for name in names:
        one = found[side, LayerBucket(name, layer), level]
        positions, total = plain_totals(case, side, name, layer, level, recent)
        assert one.tokens == case.names[side].count(name)
        assert one.positions == positions
        assert one.total == pytest.approx(total, rel=2e-3, abs=1e-12)
        assert (one.total > 0) == (positions > 0)


# The engine


def engine_total(case: Case, seat: Seat, levels: np.ndarray) -> tuple[int, float]:
    """Decode the trace's answer token by token under levels [fed, layers]: positions in which the
    top layer's attention says anything else, and the sum over them."""
    runs = [Run(seat, levels[n : n + 1]) for n in range(case.trace.fed)]
    out = watched(case.model, case.store, seat, case.trace, runs)[-1][3]
    case.store.free(seat)
    worst = (case.decoded.double() - out.double()).square().sum(-1).amax(-1)
    return int((worst > 1e-11).sum()), float(worst.sum())


@pytest.mark.parametrize(
    ("recent", "level"), [(-1, Level.RELEASE), (0, Level.LOW4), (5, Level.RELEASE)]
)
def test_in_the_top_layer_it_is_what_decoding_does(case: Case, recent: int, level: Level) -> None:
    """No change below it, so what is local is all there is."""
    groups = (0, LAYERS - 1)
    found = case.found(recent, groups)
    for name in dict.fromkeys(case.names["decode"]):
        one = found["decode", LayerBucket(name, 1), level]
        method = OneBucket(
            bucket=one.bucket, level=level, recent=recent, groups=groups, coarsening=COARSENING
        )
        named = ("one", method)
        prepared, placements = prepared_for(case.model, case.store, case.trace, named, LIMITS)
        job = lay(prepared, placements, case.store, case.trace, named, LIMITS)
        assert job.levels is not None
        positions, total = engine_total(case, job.seat, job.levels)
        assert one.positions == positions
        assert one.total == pytest.approx(total, rel=5e-3, abs=1e-9)


@pytest.mark.parametrize("level", [Level.RELEASE, Level.LOW4])
def test_a_label_in_the_top_layer_is_what_decoding_does(case: Case, level: Level) -> None:
    found = case.found(8, (0, LAYERS - 1))
    labels = case.names["prompt"]
    for name in set(labels) - {""}:
        one = found["prompt", LayerBucket(name, 1), level]
        placed: dict[Level, torch.Tensor] = {}
        for at, mine in ((level, True), (Level.HIGH, False)):
            tokens = [n for n, label in enumerate(labels) if (label == name) is mine]
            if at is not Level.RELEASE:
                placed[at] = torch.tensor(tokens).expand(KV_HEADS, -1)
        levels = frozenset({level} if level.is_low else ())
        everywhere = [Placement()] * (LAYERS - 1) + [Placement(placed)]
        seat = case.store.place(case.trace.prompt, everywhere, levels=levels, acts=False)
        high = np.full((case.trace.fed, LAYERS), Level.HIGH, dtype=np.int8)
        positions, total = engine_total(case, seat, high)
        assert one.positions == positions == case.trace.fed
        assert one.total == pytest.approx(total, rel=5e-3)


# Windows, groups, names


@pytest.mark.parametrize("recent", [-1, 0, 3, 7, 14])
def test_positions_begin_when_the_first_token_has_left_the_window(case: Case, recent: int) -> None:
    found, fed = case.found(recent), case.trace.fed
    for name in set(case.names["decode"]):
        first = case.names["decode"].index(name)
        one = found["decode", LayerBucket(name, 0), Level.RELEASE]
        # Token 3 of 10 and a window of 2 (its own beside them): felt from 6 on, 4 positions.
        assert one.positions == max(fed - first - recent - 1, 0)


def test_a_bucket_that_never_leaves_the_window_changes_nothing(case: Case) -> None:
    name = bucket_name(tag(23, False, False, Choice.FORCED, Next.FAR), COARSENING)
    assert case.names["decode"].index(name) == case.trace.fed - 5
    for level in LADDER:
        inside = case.found(4)["decode", LayerBucket(name, 0), level]
        assert (inside.tokens, inside.positions, inside.total) == (5, 0, 0.0)
    edge = case.found(3)["decode", LayerBucket(name, 0), Level.RELEASE]
    assert edge.positions == 1
    assert edge.total > 0


def test_high_changes_nothing_and_more_bits_less(case: Case) -> None:
    found = case.found(2)
    for (side, bucket, level), one in found.items():
        if level is Level.HIGH:
            assert one.total == 0
            two, four, eight = (
                found[side, bucket, low].total for low in (Level.LOW2, Level.LOW4, Level.LOW8)
            )
            assert two > four > eight > 0


def test_a_groups_layers_add_up(case: Case) -> None:
    apart, together = case.found(2), case.found(2, (0, 1))
    for (side, bucket, level), one in together.items():
        layers = layer_groups(LAYERS, (0, 1))[bucket.group]
        parts = [apart[side, LayerBucket(bucket.name, layer), level] for layer in layers]
        assert one.total == pytest.approx(sum(part.total for part in parts), rel=1e-12)
        assert {part.positions for part in parts} == {one.positions}
        assert {part.tokens for part in parts} == {one.tokens}


def test_coarser_names_are_other_buckets(case: Case) -> None:
    found = case.found(2, coarsening="role")
    names = {bucket.name for side, bucket, _ in found if side == "decode"}
    assert names == {"function_selector", "argument_boundary", "layout", "required_key"}


def test_order_and_sides(case: Case) -> None:
    given = {"groups": 2, "coarsening": COARSENING, "recent": 2, "ladder": LADDER[:2]}
    given["sinks"] = SINKS
    found = distortions(case.model, case.store, case.trace, **given, sides=("prompt",))  # type: ignore[arg-type]
    names = list(dict.fromkeys(case.names["prompt"][SINKS:-1]))
    assert [(one.side, one.bucket.name, one.bucket.group, one.level) for one in found] == [
        ("prompt", name, group, level)
        for name in names
        for group in range(2)
        for level in (Level.RELEASE, Level.LOW2)
    ]
    unlabelled = replace(case.trace.request, prompt_labels=None)  # type: ignore[type-var]
    bare = replace(case.trace, request=unlabelled)
    assert distortions(case.model, case.store, bare, **given, sides=("decode",))  # type: ignore[arg-type]


def test_positions_that_do_not_attend_together_are_one_sum(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = case.found(3)
    monkeypatch.setattr("pask.calibration.distortion._POSITIONS", 5)
    for key, one in case.found(3).items():
        assert one.total == pytest.approx(whole[key].total, rel=1e-4)


def test_refusals(case: Case) -> None:
    def ask(trace: Trace, **other: object) -> None:
        given = {"groups": 2, "coarsening": COARSENING, "recent": 2, "ladder": LADDER}
        distortions(case.model, case.store, trace, **{**given, **other})  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="no tag grammar"):
        ask(replace(case.trace, decoded=tuple(replace(d, tag=None) for d in case.trace.decoded)))
    for labels in (None, case.trace.request.prompt_labels[1:]):  # type: ignore[index]
        request = replace(case.trace.request, prompt_labels=labels)  # type: ignore[type-var]
        with pytest.raises(ValueError, match="not every token has one"):
            ask(replace(case.trace, request=request))
    with pytest.raises(ValueError, match="a side is one of"):
        ask(case.trace, sides=("both",))
    with pytest.raises(ValueError, match="-1 at least"):
        ask(case.trace, recent=-2)
    with pytest.raises(PaskError, match="unknown coarsening"):
        ask(case.trace, coarsening="rule")
    with pytest.raises(PaskError, match="4 groups of 3 layers"):
        ask(case.trace, groups=4)
    gone = case.store.fork(case.trace.prompt)
    case.store.free(gone)
    with pytest.raises(ValueError, match="freed"):
        ask(replace(case.trace, prompt=gone))


def test_an_answer_of_which_nothing_was_fed_has_no_positions(tmp_path: Path) -> None:
    model = load_model(str(tiny_folder(tmp_path, "llama", head_dim=HEAD_DIM)))
    store = new_store(model, seats=4, capacity_tokens=1024)
    request = replace(toy_requests(model)[0], prompt_labels=(Label.USER,) * 12)
    limits = Limits(1)
    answer = next(iter(generate(model, [Task(request, full([request])[0].methods)], limits)))
    trace = record_trace(model, store, model.token_texts, request, answer.token_ids, limits)
    found = distortions(
        model, store, trace, groups=1, coarsening=COARSENING, recent=0, ladder=LADDER
    )
    assert [(one.side, one.tokens, one.positions, one.total) for one in found] == [
        ("prompt", 11, 0, 0.0)  # the last token stays
    ] * len(LADDER)
