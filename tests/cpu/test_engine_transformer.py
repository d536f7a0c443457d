"""Our transformer against transformers' own, and a decode step against a prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pask.engine.loading import LoadedModel, load_model
from tests.cpu.stores import fed, prefilled, small_store
from tests.cpu.tiny import LAYOUTS, VOCAB_SIZE, tiny_folder

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{layout} tied": (layout, {"tie_word_embeddings": True}) for layout in LAYOUTS},
    **{f"{layout} untied": (layout, {"tie_word_embeddings": False}) for layout in LAYOUTS},
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "one kv head": ("qwen3", {"num_key_value_heads": 1}),
    "no groups": ("qwen2", {"num_key_value_heads": 4}),
    "wide heads": ("qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout, config = VARIANTS[request.param]
    return tiny_folder(tmp_path_factory.mktemp("model"), layout, seed=1, **config)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


@pytest.fixture
def ids() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(VOCAB_SIZE, (90,), generator=generator).tolist()


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_logits_are_those_of_transformers(model: LoadedModel, oracle: Any, ids: list[int]) -> None:
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    ours = model.transformer.all_logits(ids)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert ours.argmax(-1).unique().numel() > 10  # not one token everywhere


def test_prefill_hands_out_the_cache_of_transformers(
    model: LoadedModel, oracle: Any, ids: list[int]
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    logits = model.transformer.prefill(ids, lambda layer, q, k, v: seen.append((k, v)))
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), use_cache=True)
    torch.testing.assert_close(logits, expected.logits[0, -1], rtol=1e-4, atol=1e-4)
    assert len(seen) == model.layout.layers
    for (keys, values), layer in zip(seen, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, layer.values[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prompt", [1, 2, 50])
def test_decoding_token_by_token_is_reading_all_at_once(
    model: LoadedModel, ids: list[int], prompt: int
) -> None:
    expected = model.transformer.all_logits(ids)
    store = small_store(model, torch.float32)
    seat = prefilled(model, store, ids[:prompt])
    for position in range(prompt, len(ids)):
        assert seat.position == position
        (logits,) = fed(model, store, [seat], [[ids[position]]])
        torch.testing.assert_close(logits, expected[position], rtol=1e-3, atol=1e-3)
    store.check()


def test_half_precision_kv_stays_near(model: LoadedModel, ids: list[int]) -> None:
    expected = model.transformer.all_logits(ids)[-1]
    store = small_store(model)
    (logits,) = fed(model, store, [prefilled(model, store, ids[:-1])], [[ids[-1]]])
    assert 0 < (logits - expected).abs().max() < 0.05 * expected.std()


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_do_not_depend_on_the_batch(
    model: LoadedModel, ids: list[int], threads: int
) -> None:
    """Bit for bit: alone, among others of any number and order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        store = small_store(model)
        prompts = [
            prefilled(model, store, ids[start : start + 3 + 4 * start]) for start in range(16)
        ]
        alone = [fed(model, store, [store.fork(prompt)], [[5]])[0] for prompt in prompts]
        for size in (2, 3, 4, 5, 7, 16):
            order = torch.randperm(16, generator=torch.Generator().manual_seed(size))[:size]
            seats = [store.fork(prompts[i]) for i in order]
            for row, i in zip(fed(model, store, seats, [[5]] * size), order, strict=True):
                assert torch.equal(row, alone[i])
            for seat in seats:
                store.free(seat)
    finally:
        torch.set_num_threads(before)


def test_a_run_of_tokens_is_feeding_them_one_by_one(model: LoadedModel, ids: list[int]) -> None:
    """Bit for bit, whatever the lengths of the runs and whoever is fed beside them."""
    store = small_store(model)
    prompt = prefilled(model, store, ids[:30])
    single = store.fork(prompt)
    expected = [fed(model, store, [single], [[token]])[0] for token in ids[30:70]]
    together, others = store.fork(prompt), store.fork(prompt)
    start = 30
    for length in (1, 2, 17, 3, 16, 1):
        run = ids[start : start + length]
        logits = fed(model, store, [others, together], [[7, 8], run])
        for row, wanted in zip(logits[2:], expected[start - 30 :], strict=False):
            assert torch.equal(row, wanted)
        start += length


def test_a_long_prompt_is_read_in_chunks_of_rows(
    model: LoadedModel, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.transformer.all_logits(ids)
    monkeypatch.setattr("pask.engine.transformer.CHUNK_ROWS", 16)
    assert torch.equal(model.transformer.all_logits(ids), expected)
