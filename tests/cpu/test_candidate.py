"""A candidate as a method: where tokens end and what they cost by hand; replay against decoding."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from pask.calibration.candidate import Candidate, levels_by_name
from pask.calibration.intervention import OneBucket, OneLabel
from pask.calibration.scan import _result
from pask.engine.decode import generate, new_store
from pask.engine.generation import Limits, Task
from pask.engine.loading import LoadedModel, load_model
from pask.engine.replay import Replayer
from pask.methods.contract import Captures, Decoded, Method, Placement, PromptInfo, Wants
from pask.methods.full import FullKV
from pask.methods.levels import Level
from pask.structure.buckets import LayerBucket, bucket_name
from pask.structure.labels import Label
from tests.cpu.conformance_requests import grammar_of
from tests.cpu.pask_policies import FAR_TAG, LAYOUT, UNSEEN_TAG, VALUE, VALUE_TAG, H, L, R
from tests.cpu.test_pask_plan import LABELS, info
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import CALLS, SomeRequest, toy_requests

Table = Mapping[LayerBucket, Level]
PROMPT_TABLE: Table = {
    LayerBucket("user", 0): L,
    LayerBucket("user", 1): R,
    LayerBucket("function_name", 1): L,
    LayerBucket("chat_scaffold", 0): R,
}
DECODE_TABLE: Table = {
    LayerBucket(VALUE, 0): R,
    LayerBucket(VALUE, 1): L,
    LayerBucket(LAYOUT, 0): H,
    LayerBucket(LAYOUT, 1): R,
}


def made(side: str, table: Table, groups: tuple[int, ...] = (1, 2), **more: int) -> Candidate:
    return Candidate(side=side, table=tuple(sorted(table.items())), groups=groups, **more)  # type: ignore[arg-type]


def placed(method: Candidate, about: PromptInfo) -> list[str]:
    """A character a token, a text a layer."""
    state = method.open(about)
    texts = []
    for layer in range(about.layers):
        placement = state.place(layer, Captures())
        placement.check(about, state.levels)
        shown = ["."] * about.prompt_tokens
        tokens = placement.tokens or {H: torch.arange(about.prompt_tokens)[None]}
        for level, rows in tokens.items():
            assert (rows == rows[0]).all()
            for token in rows[0].tolist():
                shown[token] = {L: "l", H: "H"}[level]
        texts.append("".join(shown))
    return texts


# LABELS: one of the chat template, 4 of a function's name, 2 of a type, 4 of the user's words, one
# of the template. Layers are in groups of 1 and 2.


def test_a_prompt_lies_where_the_table_says() -> None:
    method = made("prompt", PROMPT_TABLE, sinks=1)
    # The template's tokens are the sink and the last one, which stay.
    assert placed(method, info(LABELS)) == ["HHHHHHHllllH", *["HllllHH....H"] * 2]
    assert placed(dataclasses.replace(method, sinks=0), info(LABELS)) == [
        ".HHHHHHllllH",
        *["HllllHH....H"] * 2,
    ]
    assert placed(dataclasses.replace(method, sinks=9), info(LABELS)) == [
        "HHHHHHHHHllH",
        *["HHHHHHHHH..H"] * 2,
    ]
    state = method.open(info(LABELS))
    assert (set(state.levels), state.wants, state.acts_on_tokens) == ({L}, Wants(), False)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6])
def test_short_prompts_keep_their_first_tokens_and_the_last(length: int) -> None:
    about = info((Label.USER,) * length)
    expected = "H" * length if length < 6 else "HHHH.H"
    assert placed(made("prompt", PROMPT_TABLE), about)[2] == expected


def test_a_side_leaves_the_other_one_alone() -> None:
    answer = made("decode", DECODE_TABLE, recent=2).open(info(None))
    assert [answer.place(layer, Captures()) for layer in range(3)] == [Placement()] * 3
    assert (set(answer.levels), answer.recent, answer.acts_on_tokens) == ({L}, 2, True)
    # A table that names none of the prompt's labels leaves it as it is.
    other = made("prompt", {LayerBucket("enum", 0): L}).open(info(LABELS))
    assert [other.place(layer, Captures()) for layer in range(3)] == [Placement()] * 3


def test_a_decoded_token_ends_where_the_table_says() -> None:
    state = made("decode", DECODE_TABLE).open(info(None))
    ends = [
        tuple(state.level_of(Decoded(n, 7, b"x", tag)))
        for n, tag in enumerate([VALUE_TAG, FAR_TAG, UNSEEN_TAG, VALUE_TAG])
    ]
    assert ends == [(R, L, L), (H, R, R), (H, H, H), (R, L, L)]


def test_what_a_candidate_breaks_does_not_weigh_in_its_cost() -> None:
    """An answer that was given up after one token costs what Full KV's two tokens would."""
    answer = made("decode", DECODE_TABLE)
    broken = SimpleNamespace(
        generation=SimpleNamespace(tags=(VALUE_TAG,)),
        first_difference=0,
        given_up=True,
        token_layers=3,
    )
    reference = SimpleNamespace(names=(VALUE, LAYOUT), correct=True)
    row = SimpleNamespace(task=SimpleNamespace(request=SimpleNamespace(prompt_labels=LABELS)))
    begun = SimpleNamespace(reference=reference, row=row)
    found = _result(answer, broken, begun)  # type: ignore[arg-type]
    assert found["tokens"] == 2
    assert found["cost"] == answer.tokens_at_high([VALUE, LAYOUT])
    assert found["given_up"]
    assert not found["correct"]


def test_names_are_those_of_tokens_that_may_be_lowered() -> None:
    prompt = made("prompt", PROMPT_TABLE, sinks=1)
    assert prompt.names(LABELS) == ["function_name"] * 4 + ["type"] * 2 + ["user"] * 4
    assert made("prompt", PROMPT_TABLE, sinks=4).names(LABELS[:5]) == []
    assert made("prompt", PROMPT_TABLE, sinks=4).names(LABELS[:1]) == []


def test_the_cost_of_names() -> None:
    """In tokens at HIGH, of 3 layers in groups of 1 and 2: the user's 5/48, a function's 16/48 and
    10/48, values 10/48, layout 16/48, and 1 for what the table does not know."""
    prompt, answer = made("prompt", PROMPT_TABLE), made("decode", DECODE_TABLE)
    assert prompt.tokens_at_high(["user"]) == pytest.approx(5 / 48)
    assert prompt.tokens_at_high(["user"] * 3 + ["function_name", "type"]) == pytest.approx(
        (15 + 16 + 10 + 48) / 48
    )
    assert answer.tokens_at_high([VALUE, LAYOUT, LAYOUT, "enum"]) == pytest.approx(
        (10 + 16 + 16 + 48) / 48
    )
    assert answer.tokens_at_high([]) == 0


def test_a_group_that_a_table_lacks_is_at_high() -> None:
    table = {LayerBucket("b", 1): R, LayerBucket("a", 2): L}
    assert levels_by_name(table, 3) == {"b": (H, R, H), "a": (H, H, L)}


def test_what_a_candidate_cannot_do_without() -> None:
    with pytest.raises(ValueError, match="candidate: groups of 4 layers, not 3"):
        made("decode", {}, groups=(2, 2)).open(info(LABELS))
    with pytest.raises(ValueError, match="made of labels, and the request has none"):
        made("prompt", {}).open(info(None))
    with pytest.raises(ValueError, match="made of tags, and the request has no tag grammar"):
        made("decode", {}).open(info(None)).level_of(Decoded(0, 7, b"x", None))


# In the engine

LIMITS = Limits(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return load_model(str(tiny_folder(folder, "qwen3", seed=6, head_dim=32, num_hidden_layers=3)))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    """Calls with tags; prompts of 27 tokens and more that end with the user's words."""
    tags = grammar_of(model, CALLS).tags
    return [
        dataclasses.replace(
            request,
            tag_grammar=tags,
            prompt_labels=(Label.CHAT_SCAFFOLD,) * 2
            + (Label.FUNCTION_NAME,) * (len(request.prompt_ids) - 10)
            + (Label.USER,) * 7
            + (Label.CHAT_SCAFFOLD,),
        )
        for request in toy_requests(model)[3::4]
    ]


def drawn(seed: int, names: list[str], side: str) -> Candidate:
    draw = random.Random(seed)
    table = {LayerBucket(name, c): draw.choice((R, L, H)) for name in names for c in (0, 1)}
    return made(side, table, recent=draw.choice((0, 1, 4)), sinks=draw.choice((0, 2, 4)))


def test_replay_is_decoding(model: LoadedModel, requests: list[SomeRequest]) -> None:
    """And one bucket or label alone is the intervention on it."""
    store = new_store(model, seats=40, capacity_tokens=8192)
    replayer = Replayer(model, store, LIMITS)
    changed = 0
    for request in requests:
        full = Task(request, (("full", FullKV()),), 29)
        (whole,) = generate(model, [full], LIMITS)
        names = sorted({bucket_name(tag) for tag in whole.tags})
        methods: dict[str, Method] = {}
        for seed in range(4):
            methods[f"decode {seed}"] = drawn(seed, names, "decode")
            methods[f"prompt {seed}"] = drawn(seed, ["user", "function_name"], "prompt")
        value, user = LayerBucket(VALUE, 1), LayerBucket("user", 1)
        for level in (R, L):
            pair = made("decode", {value: level}, recent=1), made("prompt", {user: level}, sinks=2)
            methods[f"candidate {level} decode"], methods[f"candidate {level} prompt"] = pair
            methods[f"one {level} decode"] = OneBucket(
                bucket=value, level=level, recent=1, groups=(0, 1)
            )
            methods[f"one {level} prompt"] = OneLabel(
                bucket=user, level=level, sinks=2, groups=(0, 1)
            )
        task = Task(request, tuple(methods.items()), 29)
        decoded = {
            one.entry: one for one in generate(model, [task], LIMITS, max_batch=8, longest_run=1)
        }
        for entry, one in decoded.items():
            if entry.startswith("one"):
                twin = decoded[entry.replace("one", "candidate")]
                assert dataclasses.replace(twin, entry=entry) == one
        trace = replayer.trace(task, whole.token_ids)
        for found in replayer.replay(trace, methods.items()):
            assert found.generation == decoded[found.generation.entry]
            changed += found.first_difference is not None
        replayer.free(trace)
    assert changed > 10
