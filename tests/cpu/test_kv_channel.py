"""Prompt tokens at LOW2 whose keys are quantised by channel of 32 tokens (KIVI)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xgrammar as xgr
from transformers import AttentionInterface, AutoModelForCausalLM

from pask.engine.constraint import LegalTokens, best
from pask.engine.decode import generate, new_store
from pask.engine.generation import Limits, Task
from pask.engine.kv_seat import CHANNEL2, Seat
from pask.engine.kv_store import KVStore, OutOfPages, Run
from pask.engine.loading import LoadedModel, load_model
from pask.engine.replay import Replayer
from pask.errors import HarnessFault
from pask.methods.contract import (
    Captures,
    Decoded,
    Method,
    Placement,
    PromptInfo,
    RequestState,
)
from pask.methods.full import FullKV
from pask.methods.levels import Level
from tests.cpu import kv_stores
from tests.cpu.kv_stores import SHAPE, feed, fill, prompt_numbers, row_numbers, rows, same
from tests.cpu.tiny import VOCAB_SIZE, tiny_folder
from tests.cpu.toys import SomeRequest, full, toy_requests

LEVELS = frozenset({Level.LOW2, Level.LOW4})
KIND: dict[str, Any] = {"levels": LEVELS, "normalise": False, "channel_keys": True}
PAGE_BYTES = 32 * 32 // 4 + 32 * 4 + 32 * 32 // 4 + 32 * 1 * 4  # of one head of 32 channels


def groups(prompt: int, groups: int, kv_heads: int = 3) -> Placement:
    """The first tokens at LOW2, others in each kv head, the last at HIGH, some at LOW4 between."""
    count = 32 * groups
    order = [np.random.default_rng(head).permutation(prompt - 3) for head in range(kv_heads)]
    parts = {Level.LOW2: slice(0, count), Level.LOW4: slice(count, prompt - 3)}
    tokens = {
        level: torch.from_numpy(np.sort(np.stack([row[part] for row in order]), axis=1))
        for level, part in parts.items()
    }
    last = torch.arange(prompt - 3, prompt).expand(kv_heads, -1)
    return Placement({**tokens, Level.HIGH: last})


def opened(store: KVStore, prompt: int = 80, number: int = 2, **more: Any) -> Seat:
    seat = store.open(prompt, **{**KIND, **more})
    fill(store, seat, groups(prompt, number))
    return seat


def given_back(x: torch.Tensor, axis: int) -> torch.Tensor:
    """x with 2-bit codes of each 32 numbers along `axis`, in float64 but for fp16 ranges."""
    wide = x.double().movedim(axis, -1)
    parts = wide.reshape(*wide.shape[:-1], -1, 32)
    zero = parts.amin(-1, keepdim=True).half().double()
    step = ((parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)) / 3).half().double()
    step[step == 0] = 1
    codes = ((parts - zero) / step).round().clamp(0, 3)
    return (codes * step + zero).view(wide.shape).movedim(-1, axis)


def test_keys_share_a_range_by_channel_of_32_tokens() -> None:
    store = kv_stores.new_store()
    seat = opened(store)
    store.check()
    at = groups(80, 2).tokens
    assert at is not None
    for layer in range(SHAPE.layers):
        tokens, keys, values = store.dense(seat, layer)[CHANNEL2]
        assert torch.equal(tokens, at[Level.LOW2])
        index = tokens[:, :, None].expand(-1, -1, 32)
        exact_keys, exact_values = (x.half().gather(1, index) for x in prompt_numbers(80)[layer])
        for found, exact, axis in ((keys, exact_keys, 1), (values, exact_values, 2)):
            torch.testing.assert_close(found.double(), given_back(exact, axis), rtol=0, atol=1e-5)
            wide = exact.double().movedim(axis, -1)
            parts = wide.reshape(*wide.shape[:-1], -1, 32)
            scale = (parts.amax(-1) - parts.amin(-1)) / 3
            error = (found.double().movedim(axis, -1) - wide).abs().view(parts.shape).amax(-1)
            # Half a step, and what rounding the zero and three scales to fp16 moves.
            assert bool((error <= scale / 2 + 4 * 2.0**-11 * parts.abs().amax(-1)).all())


def test_bytes_of_groups() -> None:
    store = kv_stores.new_store(page=16)
    heads = SHAPE.heads
    seat = store.open(100, **KIND)
    fill(store, seat, groups(100, 3))
    assert store.resident_bytes(seat) == {
        "prompt": {
            "high": heads * 3 * 128,
            "low4": heads * 1 * 40,
            "channel2": heads * 3 * PAGE_BYTES,
        },
        "decode": {"high": heads * 13 * 128, "low4": heads * 15 * 40},
    }
    low = np.full((3, 2), Level.LOW4, dtype=np.int8)
    _, held = feed(store, [Run(seat, low[:1])], row_numbers(1, 0))
    ring = 16 * 128
    assert held.tolist() == [heads * (16 * 128 + 16 * 40 + 3 * PAGE_BYTES + ring)]
    assert store.pool_bytes()[CHANNEL2][0] == heads * 3 * PAGE_BYTES
    store.free(seat)
    assert store.pool_bytes()[CHANNEL2][0] == 0


def test_a_run_is_its_tokens_one_by_one_and_goes_beside_other_seats() -> None:
    alone, many = kv_stores.new_store(), kv_stores.new_store()
    one, other = opened(alone, recent=2), opened(many, recent=2, ring_slots=12)
    shifted = many.open(9, levels=frozenset({Level.LOW2}))
    fill(many, shifted)
    levels = np.array([[4, 16], [16, 4], [0, 4], [4, 4], [4, 16], [0, 0]], dtype=np.int8)
    numbers, beside = row_numbers(6, 0), row_numbers(2, 1)
    together = tuple(torch.cat(parts, dim=1) for parts in zip(numbers, beside, strict=True))
    low2 = np.full((2, 2), Level.LOW2, dtype=np.int8)
    runs = [Run(other, levels), Run(shifted, low2[:1])]
    out, held = feed(many, runs, rows(together, slice(0, 7)))  # type: ignore[arg-type]
    many.check()
    for n in range(6):
        row = slice(n, n + 1)
        expected = feed(alone, [Run(one, levels[row])], rows(numbers, row))
        assert torch.equal(out[:, n], expected[0][:, 0])
        assert held[n] == expected[1][0]
    assert same(alone, one, many, other)


def test_forks_and_cuts_leave_groups_as_they_are() -> None:
    store = kv_stores.new_store()
    seat = opened(store)
    fork = store.fork(seat)
    used = store.pool(CHANNEL2).used
    before = store.dense(seat, 1)[CHANNEL2]
    feed(store, [Run(fork, None, 5)], row_numbers(5, 0))
    store.truncate(fork, 2)
    store.check()
    assert store.pool(CHANNEL2).used == used
    assert all(map(torch.equal, before, store.dense(fork, 1)[CHANNEL2]))
    store.free(seat)
    store.check()
    assert store.pool(CHANNEL2).used == used
    store.free(fork)
    assert store.pool(CHANNEL2).used == 0


def test_placing_a_prompt_again_is_a_prefill_of_its_own() -> None:
    store = kv_stores.new_store()
    whole = store.open(80)
    fill(store, whole)
    placed, expected = store.place(whole, groups(80, 2), **KIND), opened(store)
    assert same(store, placed, store, expected)
    pair = [store.open(80, **KIND) for _ in range(2)]
    fill(store, pair, groups(80, 2))
    store.check()
    assert same(store, pair[1], store, expected)


def test_groups_have_pages_promised_for_them() -> None:
    store = kv_stores.new_store(capacity=64)
    assert store.capacity(CHANNEL2) == 64
    seat = store.open(64, **KIND)
    store.reserve(seat, {CHANNEL2: 33})
    assert not store.room_for({CHANNEL2: 1})
    fill(store, seat, groups(64, 1))
    store.check()
    store.reserve(seat, {CHANNEL2: 0})
    assert store.room_for({CHANNEL2: 32})
    assert not store.room_for({CHANNEL2: 33})
    with pytest.raises(OutOfPages, match="12 pages of LOW2 by channel asked for, 6 of 12"):
        store.reserve(seat, {CHANNEL2: 64})


def test_what_does_not_go_with_groups_is_refused() -> None:
    store = kv_stores.new_store()
    with pytest.raises(ValueError, match="stored plain"):
        store.open(80, **{**KIND, "normalise": True})
    seat = store.open(80, **KIND)
    odd = Placement({Level.LOW2: torch.arange(31).expand(3, -1)})
    with pytest.raises(ValueError, match="31 LOW2 tokens are not in groups of 32"):
        store.add_prompt([seat], 0, *prompt_numbers(80)[0], odd)
    plain = store.open(80, **{**KIND, "channel_keys": False})
    with pytest.raises(ValueError, match="different make"):
        store.add_prompt([seat, plain], 0, *prompt_numbers(80)[0])
    seat = opened(store)
    with pytest.raises(ValueError, match="not among the seat's"):
        store.begin([Run(seat, np.full((1, 2), Level.LOW2, dtype=np.int8))])


# With a model


@dataclass(frozen=True)
class Groups(Method):
    """All prompt tokens but the last at LOW2 as far as they make groups, the others at LOW4."""

    name: ClassVar[str] = "groups"
    label: ClassVar[str] = "Groups"
    paper: ClassVar[str] = "a toy"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "none"
    budgets: ClassVar[tuple[float, float]] = (0.0, 1.0)

    extra: int = 0
    shifted: bool = False
    decoded: Level = Level.LOW4

    def open(self, info: PromptInfo) -> RequestState:
        return _GroupsState(self, info)


class _GroupsState(RequestState):
    levels = LEVELS
    channel_keys = True
    acts_on_tokens = True

    def __init__(self, method: Groups, info: PromptInfo) -> None:
        self.method, self.info, self.shifted_keys = method, info, method.shifted

    def place(self, layer: int, captures: Captures) -> Placement:
        prompt = torch.arange(self.info.prompt_tokens).expand(self.info.kv_heads, -1)
        low = in_groups(self.info.prompt_tokens) + self.method.extra
        return Placement({Level.LOW2: prompt[:, :low], Level.LOW4: prompt[:, low:]})

    def level_of(self, decoded: Decoded) -> Sequence[Level]:
        return [self.method.decoded] * self.info.layers


def in_groups(prompt: int) -> int:
    return (prompt - 1) // 32 * 32


@pytest.fixture(scope="module", params=[32, 64])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"head_dim": request.param, "num_hidden_layers": 3}
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama", seed=3, **shape)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    return toy_requests(model)[5::3]  # of 37 to 82 tokens


class _Dequantised:
    """transformers' model: rows of an answer attend to what codes give back of keys and values.

    The prompt's own rows see all as it is; a row of the answer sees itself as it is."""

    def __init__(self, folder: Path) -> None:
        self.prompt = 0
        AttentionInterface.register("dequantised", self._attend)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="dequantised"
        )

    def logits(self, ids: list[int], prompt: int) -> torch.Tensor:
        self.prompt = prompt
        with torch.no_grad():
            found: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return found

    def _attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        group, size = q.shape[1] // k.shape[1], q.shape[2]
        low = in_groups(self.prompt)
        by_channel = given_back(k[0, :, :low], 1)
        low_keys = torch.cat((by_channel, four_bit(k[0, :, low:])), 1).float()
        low_values = given_back(v[0, :, :low], 2)
        low_values = torch.cat((low_values, four_bit(v[0, :, low:])), 1).float()
        k, v, low_keys, low_values = (
            x.repeat_interleave(group, 0) for x in (k[0], v[0], low_keys, low_values)
        )
        row, token = torch.arange(size)[:, None], torch.arange(size)
        stored = (row >= self.prompt) & (token < row)
        scores = torch.where(stored, q[0] @ low_keys.transpose(1, 2), q[0] @ k.transpose(1, 2))
        scores = (scores / q.shape[-1] ** 0.5).masked_fill(token > row, -torch.inf)
        weights = scores.softmax(-1)
        out = (weights * stored) @ low_values + (weights * ~stored) @ v
        return out.transpose(0, 1)[None], None


def four_bit(x: torch.Tensor) -> torch.Tensor:
    """x with 4-bit codes of each 32 channels."""
    parts = x.double().unflatten(-1, (-1, 32))
    zero = parts.amin(-1, keepdim=True).half().double()
    step = ((parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)) / 15).half().double()
    codes = ((parts - zero) / step).round().clamp(0, 15)
    return (codes * step + zero).flatten(-2)


def test_answers_are_those_over_dequantised_keys(
    folder: Path, model: LoadedModel, requests: list[SomeRequest]
) -> None:
    oracle = _Dequantised(folder)
    tasks = [Task(request, (("groups", Groups()), ("full", FullKV()))) for request in requests]
    differ = 0
    found = {
        (one.request_id, one.entry): one
        for one in generate(model, tasks, Limits(16), kv_dtype=torch.float32)
    }
    for request in requests:
        answer, prompt = found[request.id, "groups"].token_ids, len(request.prompt_ids)
        logits = oracle.logits([*request.prompt_ids, *answer], prompt)
        matcher = xgr.GrammarMatcher(request.grammar)
        for step, token in enumerate(answer):
            mask = LegalTokens([matcher], VOCAB_SIZE).mask(0)
            assert best([mask], logits[prompt - 1 + step][None].clone(), ["r"]) == [token]
            assert matcher.accept_token(token)
        differ += answer != found[request.id, "full"].token_ids
    assert differ  # two bits are few: the codes were read


def test_replay_is_decoding(model: LoadedModel, requests: list[SomeRequest]) -> None:
    limits, methods = Limits(20), (("groups", Groups()),)
    known = {one.request_id: one for one in generate(model, full(requests), limits)}
    store = new_store(model, seats=8, capacity_tokens=4096)
    replayer = Replayer(model, store, limits)
    for request in requests:
        (decoded,) = generate(model, [Task(request, methods)], limits)
        trace = replayer.trace(Task(request, methods), known[request.id].token_ids)
        (one,) = replayer.replay(trace, methods)
        assert one.generation == decoded
        replayer.free(trace)
    store.check()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Groups(extra=1), r"layer 0: .*65 LOW2 tokens, with channel_keys a multiple of 32"),
        (Groups(shifted=True), "shifted_keys is False"),
        (Groups(decoded=Level.LOW2), "LOW2.* is not among the levels of decoded tokens"),
    ],
)
def test_a_method_that_breaks_the_contract_is_one_line(
    model: LoadedModel, requests: list[SomeRequest], method: Method, expected: str
) -> None:
    (long,) = [request for request in requests if len(request.prompt_ids) == 82]
    with pytest.raises(HarnessFault, match=rf"bad, row r\d+.*{expected}"):
        list(generate(model, [Task(long, (("bad", method),))], Limits(4)))
