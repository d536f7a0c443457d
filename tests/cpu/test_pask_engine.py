"""PASK in the engine: a tiny random model under made-up policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from pask.engine.decode import generate, new_store
from pask.engine.generation import Generation, Limits, Task
from pask.engine.loading import LoadedModel, load_model
from pask.engine.replay import Replayer
from pask.errors import HarnessFault
from pask.methods.contract import UNREACHABLE
from pask.methods.full import FullKV
from pask.methods.pask import PASK
from pask.policy.policy import Policy
from pask.structure.buckets import bucket_name
from pask.structure.ebnf import EbnfGrammar
from pask.structure.labels import Label
from pask.structure.tags import Role, TokenClass
from tests.cpu.pask_policies import made_up
from tests.cpu.tiny import tiny_folder
from tests.cpu.toys import CALLS, SomeRequest, toy_requests

LIMITS = Limits(30)
ROLES = {
    "name": (TokenClass.FUNCTION_NAME, Role.FUNCTION_SELECTOR),
    "value": (TokenClass.STRING, Role.REQUIRED_VALUE),
}
SETTINGS = (0.05, 0.45, 0.8, 0.97, 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    shape = {"head_dim": 32, "num_hidden_layers": 3}
    return load_model(str(tiny_folder(folder, "qwen3", seed=6, **shape)))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    """Calls with tags, and prompts that end with the user's words."""
    return [
        replace(
            request,
            tag_grammar=EbnfGrammar(CALLS, ROLES),
            prompt_labels=(Label.CHAT_SCAFFOLD,) * 2
            + (Label.FUNCTION_NAME,) * (len(request.prompt_ids) - 10)
            + (Label.USER,) * 7
            + (Label.CHAT_SCAFFOLD,),
        )
        for request in toy_requests(model)[3::4]
    ]


@pytest.fixture(scope="module")
def whole(model: LoadedModel, requests: list[SomeRequest]) -> dict[str, Generation]:
    tasks = [Task(request, (("full", FullKV()),), 29) for request in requests]
    return {found.request_id: found for found in generate(model, tasks, LIMITS)}


@pytest.fixture(scope="module")
def policies(whole: dict[str, Generation]) -> list[Policy]:
    """For the tags that Full KV's answers have, all but one bucket."""
    names = sorted({bucket_name(tag) for found in whole.values() for tag in found.tags})
    assert len(names) > 4
    labels = ["user", "function_name"]
    return [made_up(seed, names[1:], labels, (1, 2)) for seed in range(2)]


def entries(policies: Sequence[Policy]) -> Iterator[tuple[str, PASK]]:
    for number, policy in enumerate(policies):
        for setting in SETTINGS:
            for stages in ("both", "decode", "prompt"):
                method = PASK(nominal=setting, recent=1, sinks=2, stages=stages, policy=policy)
                yield f"{number} {stages} {setting}", method
            by_letter = replace(method, stages="both", reserve="by_state", prompt_path="distortion")
            yield f"{number} to the letter {setting}", by_letter
            side_by_side = replace(method, stages="both", share="by_distortion")
            yield f"{number} side by side {setting}", side_by_side


def test_replay_is_decoding_and_the_top_is_full_kv(
    model: LoadedModel,
    requests: list[SomeRequest],
    whole: dict[str, Generation],
    policies: list[Policy],
) -> None:
    methods = tuple(entries(policies))
    store = new_store(model, seats=50, capacity_tokens=8192)
    replayer = Replayer(model, store, LIMITS)
    changed = 0
    for request in requests:
        task = Task(request, methods, 29)
        decoded = {
            found.entry: found
            for found in generate(model, [task], LIMITS, max_batch=16, longest_run=1)
        }
        assert set(generate(model, [task], LIMITS)) == set(decoded.values())
        trace = replayer.trace(task, whole[request.id].token_ids)
        for one in replayer.replay(trace, methods):
            assert one.generation == decoded[one.generation.entry]
            changed += one.first_difference is not None
        replayer.free(trace)
        for name, method in methods:
            if method.setting == 1:
                assert decoded[name] == replace(whole[request.id], entry=name)
    assert 10 < changed < len(methods) * len(requests)


def test_a_request_is_within_its_budget_or_says_so(
    model: LoadedModel, requests: list[SomeRequest], policies: list[Policy]
) -> None:
    """A page of each pool, the ring's among them, is the price of rounding."""
    page = 16 * 2 * 32 * 2 * 3 * 2  # slots, K and V, channels, bytes, layers, kv heads
    told = 0
    tasks = [Task(request, tuple(entries(policies)), 29) for request in requests]
    methods = dict(entries(policies))
    for found in generate(model, tasks, LIMITS):
        held = found.bytes.prompt + found.bytes.decode
        unseen = sum(bucket_name(tag) not in _names(methods[found.entry]) for tag in found.tags)
        most = methods[found.entry].setting * found.bytes.full + 2.32 * page + unseen * page / 16
        assert held <= most or UNREACHABLE in found.notes, found.entry
        told += UNREACHABLE in found.notes
    assert 0 < told < len(methods) * len(requests)


def _names(method: PASK) -> set[str]:
    assert method.policy is not None
    return {one.bucket.name for one in method.policy.decode.evidence.buckets}


def test_more_of_the_knob_is_never_fewer_bytes_of_a_prompt(
    model: LoadedModel, requests: list[SomeRequest], policies: list[Policy]
) -> None:
    """Where the answer stays at HIGH the bytes follow from the prompt alone, pages and all."""
    grid = [n / 20 for n in range(1, 21)]
    for policy in policies:
        methods = tuple(
            (f"{s}", PASK(nominal=s, recent=1, sinks=2, stages="prompt", policy=policy))
            for s in grid
        )
        for request in requests:
            # One new token, which is not fed.
            found = generate(model, [Task(request, methods, 0)], Limits(1))
            held = {one.entry: one.bytes.prompt + one.bytes.decode for one in found}
            by_setting = [held[f"{s}"] for s in grid]
            assert by_setting == sorted(by_setting)
            assert by_setting[0] < by_setting[-1] or len(request.prompt_ids) < 50


def test_a_request_without_tags_is_refused_in_one_line(
    model: LoadedModel, requests: list[SomeRequest], policies: list[Policy]
) -> None:
    bare = replace(requests[-1], tag_grammar=None)
    method = PASK(nominal=0.9, recent=1, policy=policies[0])
    with pytest.raises(HarnessFault, match=r"pask, row .*ValueError: pask: the decode side needs"):
        list(generate(model, [Task(bare, (("pask", method),), 60)], LIMITS))
