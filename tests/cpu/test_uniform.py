"""Uniform quantisation against attention over what literal loops say is stored, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar as xgr
from transformers import AutoModelForCausalLM, DynamicCache

from baselines.uniform import UniformInt2, UniformInt4, UniformInt8
from pask.engine.decode import generate
from pask.engine.generation import Generation, Limits, Task
from pask.engine.loading import LoadedModel, load_model, tokenizer_info
from pask.methods.contract import Captures, Decoded, Method, PromptInfo, Wants
from pask.methods.full import FullKV
from pask.methods.levels import Level
from tests.cpu.tiny import VOCAB_SIZE, tiny_folder
from tests.cpu.toys import SomeRequest, toy_requests

NEW_TOKENS = 24
PER_TOKEN = [
    (UniformInt8, Level.LOW8, 0.5625),
    (UniformInt4, Level.LOW4, 0.3125),
    (UniformInt2, Level.LOW2, 0.1875),
]


def info(prompt: int) -> PromptInfo:
    return PromptInfo(prompt, 3, 2, 1, 32)


def levels_of(method: Method, prompt: int) -> list[list[Level]]:
    """Each prompt token's level, by kv head, the same in all layers."""
    about = info(prompt)
    state = method.open(about)
    found = []
    for layer in range(about.layers):
        placement = state.place(layer, Captures())
        placement.check(about, state.levels)
        assert placement.tokens is not None
        heads = [[Level.RELEASE] * prompt for _ in range(about.kv_heads)]
        for level, tokens in placement.tokens.items():
            for head, row in enumerate(tokens.tolist()):
                for token in row:
                    heads[head][token] = level
        found.append(heads)
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize(("kind", "level", "share"), PER_TOKEN)
@pytest.mark.parametrize("keys", ["plain", "statistics"])
@pytest.mark.parametrize("prompt", [1, 2, 31, 32, 64, 100])
def test_all_tokens_go_to_one_level(
    kind: Any, level: Level, share: float, keys: str, prompt: int
) -> None:
    method = kind(keys=keys, recent=5)
    assert (method.budget, method.budgets, method.has_knob) == (share, (share, share), False)
    assert levels_of(method, prompt) == [[level] * prompt] * 2
    state = method.open(info(prompt))
    assert (state.wants, state.notes, state.recent) == (Wants(), (), 5)
    assert state.shifted_keys == (keys == "statistics")
    assert (state.channel_keys, state.acts_on_tokens) == (False, True)
    assert state.level_of(Decoded(0, 7, b"x", None)) == (level,) * 3


def test_the_default_forms() -> None:
    assert UniformInt8() == UniformInt8(budget=0.5625, recent=-1, keys="statistics")
    assert UniformInt4() == UniformInt4(budget=0.3125, recent=-1, keys="statistics")
    assert UniformInt2() == UniformInt2(budget=0.1875, recent=-1, keys="channel", decode="residual")


def test_by_channel_whole_groups_are_quantised_and_the_rest_stays() -> None:
    method = UniformInt2(keys="channel")
    for prompt, grouped in ((1, 0), (31, 0), (32, 32), (33, 32), (64, 64), (100, 96)):
        rest = [Level.HIGH] * (prompt - grouped)
        assert levels_of(method, prompt) == [[Level.LOW2] * grouped + rest] * 2
        state = method.open(info(prompt))
        assert state.notes == (() if grouped else ("residual",))
        assert (state.channel_keys, state.shifted_keys) == (True, False)
        assert (state.acts_on_tokens, state.levels) == (False, {Level.LOW2})


def test_by_channel_decoded_tokens_may_go_to_four_bits() -> None:
    state = UniformInt2(keys="channel", decode="int4", recent=3).open(info(64))
    assert (state.acts_on_tokens, state.recent) == (True, 3)
    assert state.levels == {Level.LOW2, Level.LOW4}
    assert state.level_of(Decoded(0, 7, b"x", None)) == (Level.LOW4,) * 3


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (UniformInt8, {"keys": "channel"}),
        (UniformInt4, {"keys": "channel"}),
        (UniformInt4, {"keys": "none"}),
        (UniformInt4, {"recent": -2}),
        (UniformInt4, {"budget": 0.33}),
        (UniformInt2, {"decode": "int8"}),
        (UniformInt2, {"keys": "channel", "recent": 2}),
    ],
)
def test_refused_parameters(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=kind.name):
        kind(**fields)


# What is stored, number by number


def restored(numbers: Sequence[float], bits: int) -> list[float]:
    """What is read back of 32 numbers that share an fp16 scale and zero."""
    zero = float(np.float16(min(numbers)))
    scale = float(np.float16((max(numbers) - min(numbers)) / (2**bits - 1))) or 1.0
    codes = [min(max(round((x - zero) / scale), 0), 2**bits - 1) for x in numbers]
    return [code * scale + zero for code in codes]


def test_reading_back_by_hand() -> None:
    ramp = [float(n) for n in range(31)]
    assert restored([*ramp, 45.0], 4)[:6] == [
        0.0,
        0.0,
        3.0,
        3.0,
        3.0,
        6.0,
    ]  # steps of 3; 1.5 is even
    assert restored([*ramp, 45.0], 2) == [15.0 * round(n / 15) for n in [*ramp, 45]]
    assert restored([2.5] * 32, 2) == [2.5] * 32


def by_token(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """[heads, tokens, 32] as stored, each token of a head for itself."""
    return torch.tensor(
        [[restored(token, bits) for token in head] for head in rows.tolist()], dtype=torch.float64
    )


class _Lowered(DynamicCache):
    """A cache in which a token can be overwritten before anything attends to it."""

    lower: Callable[[int, int], None] | None = None  # of a layer's number and a position

    def update(self, *given: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(*given, **more)
        layer = given[2]
        if self.lower is not None:
            self.lower(layer, keys.shape[2] - 1)
            keys, values = self.layers[layer].keys, self.layers[layer].values
        return keys, values


class Oracle:
    """transformers in fp64, whose cache is overwritten with what is stored."""

    def __init__(self, folder: Path, bits: int, keys: str, decode_bits: int, recent: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.bits, self.keys, self.decode_bits = bits, keys, decode_bits
        self.recent = recent

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """[answer tokens, vocabulary]: what each token of the answer was chosen from."""
        cache = _Lowered()
        rows = [self._fed(cache, prompt)]
        shifts = [self._store_prompt(layer) for layer in cache.layers]

        def lower(number: int, position: int) -> None:
            layer, (center, spread) = cache.layers[number], shifts[number]
            at = slice(position, position + 1)
            key = (layer.keys[0, :, at] - center) / spread
            layer.keys[0, :, at] = by_token(key, self.decode_bits) * spread + center
            layer.values[0, :, at] = by_token(layer.values[0, :, at], self.decode_bits)

        if self.recent == -1 and self.decode_bits < 16:
            cache.lower = lower
        for number, token in enumerate(answer[:-1]):
            rows.append(self._fed(cache, [token]))
            leaves = len(prompt) + number - self.recent
            if self.recent >= 0 and leaves >= len(prompt) and self.decode_bits < 16:
                for layer in range(len(cache.layers)):
                    lower(layer, leaves)
        return torch.stack(rows)

    def _fed(self, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(torch.tensor([tokens]), past_key_values=cache).logits[
                0, -1
            ]
        return logits

    def _store_prompt(self, layer: Any) -> tuple[Any, Any]:
        """Overwrite a layer's prompt; the center and spread of its keys."""
        keys, values = layer.keys[0], layer.values[0]
        center, spread = torch.zeros(()), torch.ones(())
        if self.keys == "channel":
            for start in range(0, keys.shape[1] // 32 * 32, 32):
                at = slice(start, start + 32)
                keys[:, at] = by_token(keys[:, at].transpose(1, 2), self.bits).transpose(1, 2)
                values[:, at] = by_token(values[:, at], self.bits)
            return center, spread
        if self.keys == "statistics":
            center = keys.mean(1, keepdim=True)
            spread = (keys - center).square().mean(1, keepdim=True).sqrt().clamp(min=2**-6)
            center, spread = center.half().double(), spread.half().double()
        keys.copy_(by_token((keys - center) / spread, self.bits) * spread + center)
        values.copy_(by_token(values, self.bits))
        return center, spread


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout with biases: their keys have channels far from zero."""
    return tiny_folder(tmp_path_factory.mktemp("model"), "qwen2", seed=6, head_dim=32)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    """Prompts of 27 to 87 tokens, whose answers do not end."""
    compiler = xgr.GrammarCompiler(tokenizer_info(model))
    grammar = compiler.compile_grammar("root ::= [a-zA-Z ]{200}")
    return [SomeRequest(r.id, r.prompt_ids, grammar) for r in toy_requests(model)[3::3]]


def answers(
    model: LoadedModel, requests: Sequence[SomeRequest], method: Method
) -> list[Generation]:
    tasks = [Task(request, (("one", method),)) for request in requests]
    found = generate(model, tasks, Limits(NEW_TOKENS), kv_dtype=torch.float32)
    by_id = {one.request_id: one for one in found}
    return [by_id[request.id] for request in requests]


def choices(request: SomeRequest, logits: torch.Tensor, answer: Sequence[int]) -> list[int]:
    """The best legal token at each place of the answer."""
    matcher = xgr.GrammarMatcher(request.grammar)
    mask = xgr.allocate_token_bitmask(1, VOCAB_SIZE)
    best = []
    for row, token in zip(logits, answer, strict=True):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        legal = [t for t in range(VOCAB_SIZE) if words[t // 32] >> (t % 32) & 1]
        first, second = row[legal].topk(2)[0].tolist()
        assert first - second > 1e-4, "two tokens nearly tie: choose another seed"
        best.append(legal[int(row[legal].argmax())])
        assert matcher.accept_token(token)
    return best


@pytest.mark.parametrize(
    ("method", "bits", "decode_bits"),
    [
        (UniformInt8(), 8, 8),
        (UniformInt4(), 4, 4),
        (UniformInt4(keys="plain", recent=3), 4, 4),
        (UniformInt2(keys="statistics"), 2, 2),
        (UniformInt2(keys="plain"), 2, 2),
        (UniformInt2(), 2, 16),
        (UniformInt2(decode="int4", recent=1), 2, 4),
    ],
    ids=lambda value: f"{value.name}-{value.keys}" if isinstance(value, Method) else str(value),
)
def test_answers_are_attention_over_what_is_read_back(
    folder: Path,
    model: LoadedModel,
    requests: list[SomeRequest],
    method: Any,
    bits: int,
    decode_bits: int,
) -> None:
    oracle = Oracle(folder, bits, method.keys, decode_bits, method.recent)
    for request, found in zip(requests, answers(model, requests, method), strict=True):
        assert len(found.token_ids) == NEW_TOKENS
        logits = oracle.logits(request.prompt_ids, found.token_ids)
        assert choices(request, logits, found.token_ids) == list(found.token_ids)


def test_the_forms_differ_where_it_matters(model: LoadedModel, requests: list[SomeRequest]) -> None:
    """Else the test above could not tell them apart."""
    forms = [UniformInt2(keys=keys) for keys in ("plain", "statistics", "channel")]
    methods: list[Method] = [FullKV(), UniformInt4(), *forms, UniformInt2(decode="int4")]
    texts = {tuple(one.token_ids for one in answers(model, requests, m)) for m in methods}
    assert len(texts) == len(methods)


@pytest.mark.parametrize(("kind", "level", "share"), PER_TOKEN)
def test_bytes_are_the_declared_share_where_nothing_is_rounded(
    model: LoadedModel, kind: Any, level: Level, share: float
) -> None:
    """64 prompt tokens, whole pages, of 2 layers and 2 kv heads of 32, without an answer."""
    request = SomeRequest("whole", tuple(range(5, 69)), toy_requests(model)[0].grammar)
    task = Task(request, (("plain", kind(keys="plain")), ("statistics", kind(keys="statistics"))))
    found = {one.entry: one.bytes for one in generate(model, [task], Limits(1))}
    full = 64 * 2 * 2 * 2 * 32 * 2
    assert found["plain"].prompt == share * full
    assert found["statistics"].prompt == share * full + 2 * (2 * 2 * 32) * 2
    assert found["plain"].full_prompt == full


def test_bytes_by_channel_are_the_declared_share_of_whole_groups(model: LoadedModel) -> None:
    request = SomeRequest("whole", tuple(range(5, 69)), toy_requests(model)[0].grammar)
    longer = SomeRequest("longer", tuple(range(5, 75)), request.grammar)
    tasks = [Task(one, (("kivi", UniformInt2()),)) for one in (request, longer)]
    found = {one.request_id: one.bytes.prompt for one in generate(model, tasks, Limits(1))}
    slot = 2 * 2 * 2 * 32 * 2
    assert found["whole"] == 0.1875 * 64 * slot
    assert found["longer"] == 0.1875 * 64 * slot + 6 * slot
