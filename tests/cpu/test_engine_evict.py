"""Eviction while decoding, against transformers with every dropped token masked, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import xgrammar as xgr
from transformers import AttentionInterface, AutoModelForCausalLM

from pask.engine.constraint import LegalTokens, best
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.loading import LoadedModel, load_model
from pask.errors import HarnessFault
from pask.methods.contract import Captures, Method, Placement, PromptInfo, RequestState, Wants
from pask.methods.full import FullKV
from tests.cpu.tiny import LAYOUTS, VOCAB_SIZE, tiny_folder
from tests.cpu.toys import SomeRequest, kept_tokens, toy_requests


@dataclass(frozen=True)
class Lowest(Method):
    """Keeps what `EveryThird` keeps of the prompt; then each step drops, in each kv head, the token
    of the lowest attention so far, the newest apart."""

    name: ClassVar[str] = "lowest"
    label: ClassVar[str] = "Lowest"
    paper: ClassVar[str] = "a toy"
    color: ClassVar[str] = "#000000"
    marker: ClassVar[str] = "x"
    knob: ClassVar[str] = "none"
    budgets: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def open(self, info: PromptInfo) -> RequestState:
        _LowestState.last = _LowestState(info)
        return _LowestState.last


class _LowestState(RequestState):
    wants = Wants(step_mass=True)
    evicts = True
    last: ClassVar[_LowestState]

    def __init__(self, info: PromptInfo) -> None:
        self.info = info
        self.kept = kept_tokens(info.prompt_tokens, info.kv_heads)
        self.masses: list[torch.Tensor] = []
        self.dropped: list[torch.Tensor] = []

    def place(self, layer: int, captures: Captures) -> Placement:
        return Placement.high(self.kept)

    def evict(self, tokens: int, mass: torch.Tensor | None) -> torch.Tensor:
        assert mass is not None
        assert mass.shape == (self.info.layers, self.info.kv_heads, tokens)
        self.masses.append(mass)
        total = sum(torch.nn.functional.pad(m, (0, tokens - m.shape[-1])) for m in self.masses)
        assert isinstance(total, torch.Tensor)
        total[..., -1] = torch.inf
        total[mass == 0] = torch.inf  # not resident
        self.dropped.append(total.argmin(dim=-1, keepdim=True))
        return self.dropped[-1]


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), request.param, seed=4)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture(scope="module")
def requests(model: LoadedModel) -> list[SomeRequest]:
    return toy_requests(model)[5:12]


class _Masked:
    """transformers' model, its attention replaced by one with a mask of our own in each layer."""

    def __init__(self, folder: Path) -> None:
        self.masks = torch.empty(0)  # [layers, q_heads, rows, rows]
        self.probabilities: list[torch.Tensor] = []
        AttentionInterface.register("masked_by_layer", self._attend)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="masked_by_layer"
        )

    def logits(self, ids: list[int], masks: torch.Tensor) -> torch.Tensor:
        self.masks, self.probabilities = masks, []
        with torch.no_grad():
            found: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return found

    def _attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        group = q.shape[1] // k.shape[1]
        k, v = k[0].repeat_interleave(group, 0), v[0].repeat_interleave(group, 0)
        scores = q[0] @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + self.masks[module.layer_idx]
        weights = scores.softmax(-1)
        self.probabilities.append(weights)
        return (weights @ v).transpose(0, 1)[None], None


def rows_masked(model: LoadedModel, prompt: int, fed: int, state: _LowestState) -> torch.Tensor:
    """[layers, q_heads, prompt + fed, prompt + fed]: -inf for what a row may not see."""
    layout, size = model.layout, prompt + fed
    masks = torch.full((size, size), -torch.inf).triu(1)
    masks = masks.repeat(layout.layers, layout.kv_heads, 1, 1)
    for head, kept in enumerate(state.kept.tolist()):
        gone = sorted(set(range(prompt)) - set(kept))
        masks[:, head, prompt:, gone] = -torch.inf
    for step, dropped in enumerate(state.dropped[: fed - 1]):
        for layer in range(layout.layers):
            for head in range(layout.kv_heads):
                masks[layer, head, prompt + step + 1 :, dropped[layer, head]] = -torch.inf
    return masks.repeat_interleave(layout.group_size, dim=1)


def test_dropped_tokens_are_seen_no_more(
    folder: Path, model: LoadedModel, requests: list[SomeRequest]
) -> None:
    oracle = _Masked(folder)
    kv_heads, group = model.layout.kv_heads, model.layout.group_size
    for request in requests:
        task = Task(request, (("lowest", Lowest()),))
        (found,) = generate(model, [task], Limits(16), kv_dtype=torch.float32)
        state = _LowestState.last
        prompt = len(request.prompt_ids)
        fed = len(state.dropped)
        assert fed == found.new_tokens - (found.finish == "length")
        ids = [*request.prompt_ids, *found.token_ids[:fed]]
        logits = oracle.logits(ids, rows_masked(model, prompt, fed, state))
        matcher = xgr.GrammarMatcher(request.grammar)
        for step, token in enumerate(found.token_ids):
            mask = LegalTokens([matcher], VOCAB_SIZE).mask(0)
            assert best([mask], logits[prompt - 1 + step][None].clone(), ["r"]) == [token]
            assert matcher.accept_token(token)
        for layer, weights in enumerate(oracle.probabilities):
            grouped = weights.view(kv_heads, group, len(ids), len(ids)).sum(dim=1)
            for step, mass in enumerate(state.masses):
                expected = grouped[:, prompt + step, : prompt + step + 1]
                torch.testing.assert_close(mass[layer], expected, rtol=1e-3, atol=1e-4)


def test_an_evicting_method_keeps_its_size_and_its_answer_in_company(
    model: LoadedModel, requests: list[SomeRequest]
) -> None:
    methods: tuple[tuple[str, Method], ...] = (("full", FullKV()), ("lowest", Lowest()))
    alone = {
        found
        for request in requests
        for method in methods
        for found in generate(model, [Task(request, (method,))], Limits(20), max_batch=1)
    }
    together = list(generate(model, [Task(r, methods) for r in requests], Limits(20)))
    assert set(together) == alone
    slot = 2 * 2 * model.layout.kv_heads * model.layout.head_dim * 2  # of both layers
    for found in together:
        if found.entry == "lowest":
            kept = kept_tokens(found.prompt_tokens, 2).shape[1]
            total = found.bytes.prompt + found.bytes.decode
            assert total == -(-kept // 16) * 16 * slot  # as many tokens as the prompt left


def evicting(answer: Any) -> type[_LowestState]:
    class Faulty(_LowestState):
        def evict(self, tokens: int, mass: torch.Tensor | None) -> Any:
            return answer

    return Faulty


@pytest.fixture
def restored() -> Iterator[None]:
    before = Lowest.open
    yield
    Lowest.open = before  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (torch.zeros(2, 2, 1), "evict must answer int64"),
        (torch.zeros(1, 2, 1, dtype=torch.int64), r"evict must answer int64 \[2, 2\]"),
        (torch.full((2, 2, 1), 999), "evicts a token that is not resident"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), "evicts a token that is not resident"),
    ],
)
@pytest.mark.usefixtures("restored")
def test_a_wrong_eviction_is_one_line(
    model: LoadedModel, requests: list[SomeRequest], answer: Any, expected: str
) -> None:
    Lowest.open = lambda self, info: evicting(answer)(info)  # type: ignore[method-assign]
    with pytest.raises(HarnessFault, match=rf"bad, row r\d+.*{expected}"):
        list(generate(model, [Task(requests[0], (("bad", Lowest()),))], Limits(4)))
