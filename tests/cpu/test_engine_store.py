"""RequestKV against a plain list of tokens, and its bytes against counting by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pask.engine.store import RequestKV
from pask.errors import PaskError
from pask.methods.contract import PromptInfo


def random_kept(kv_heads: int, prompt: int, kept: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randperm(prompt, generator=generator)[:kept].sort().values for _ in range(kv_heads)
    ]
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_store_holds_what_a_list_would(data: st.DataObject) -> None:
    draw = data.draw
    layers, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    prompt, page = draw(st.integers(1, 40)), draw(st.sampled_from([1, 3, 16]))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    info = PromptInfo(prompt, layers, kv_heads, 2, 4)
    store = RequestKV(info, kv_dtype=dtype, page_slots=page)
    torch.manual_seed(draw(st.integers(0, 1000)))
    model: list[list[torch.Tensor]] = []  # by layer, the tokens' [2, kv_heads, head_dim]
    kept_of_layer = []
    for layer in range(layers):
        keys, values = torch.randn(2, kv_heads, prompt, 4)
        kept = draw(st.integers(1, prompt))
        tokens = None if kept == prompt else random_kept(kv_heads, prompt, kept, layer)
        store.add_prompt(layer, keys, values, tokens)
        rows = torch.arange(prompt).expand(kv_heads, -1) if tokens is None else tokens
        heads = range(kv_heads)
        model.append(
            [
                torch.stack(
                    [torch.stack([half[h, rows[h, n]] for h in heads]) for half in (keys, values)]
                )
                for n in range(kept)
            ]
        )
        kept_of_layer.append(kept)
    store.check()
    for step in range(draw(st.integers(0, 35))):
        assert store.position == prompt + step
        for layer in range(layers):
            key, value = torch.randn(2, kv_heads, 4)
            store.append(layer, key, value)
            model[layer].append(torch.stack((key, value)))
        store.check()
        slot = 2 * kv_heads * 4 * dtype.itemsize
        pages = sum(-(-len(tokens) // page) * page for tokens in model)
        assert store.resident_bytes() == {
            "prompt": slot * sum(kept_of_layer),
            "decode": slot * (pages - sum(kept_of_layer)),
        }
    for layer in range(layers):
        expected = torch.stack(model[layer], dim=2).to(dtype)
        assert torch.equal(torch.stack(store.resident(layer)), expected)
        assert store.kept(layer) == kept_of_layer[layer]


def filled(prompt: int, decoded: int, *, kept: int | None = None, page: int = 16) -> RequestKV:
    info = PromptInfo(prompt, 2, 3, 2, 8)
    store = RequestKV(info, page_slots=page)
    for layer in range(2):
        tokens = None if kept is None else random_kept(3, prompt, kept, layer)
        store.add_prompt(layer, torch.randn(3, prompt, 8), torch.randn(3, prompt, 8), tokens)
    for _ in range(decoded):
        for layer in range(2):
            store.append(layer, torch.randn(3, 8), torch.randn(3, 8))
    return store


SLOT = 2 * 2 * 3 * 8 * 2  # both layers' bytes of one slot: key and value, 3 heads of 8, 2 bytes


@pytest.mark.parametrize(
    ("prompt", "decoded", "slots"),
    [(16, 0, 16), (16, 1, 32), (15, 0, 16), (15, 1, 16), (15, 2, 32), (1, 0, 16), (20, 12, 32)],
)
def test_bytes_at_page_boundaries(prompt: int, decoded: int, slots: int) -> None:
    store = filled(prompt, decoded)
    assert store.resident_bytes() == {"prompt": prompt * SLOT, "decode": (slots - prompt) * SLOT}
    assert store.full_bytes(prompt, decoded) == slots * SLOT


def test_what_was_dropped_takes_no_bytes() -> None:
    store = filled(100, 5, kept=11)
    assert store.resident_bytes() == {"prompt": 11 * SLOT, "decode": 5 * SLOT}
    assert store.full_bytes(100, 5) == 112 * SLOT
    assert store.position == 105


def test_keeping_all_by_index_is_keeping_all() -> None:
    info = PromptInfo(9, 1, 2, 1, 8)
    keys, values = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    stores = [RequestKV(info), RequestKV(info)]
    stores[0].add_prompt(0, keys, values, None)
    stores[1].add_prompt(0, keys, values, torch.arange(9).expand(2, -1))
    q = torch.randn(2, 1, 8)
    assert torch.equal(stores[0].attend(0, q), stores[1].attend(0, q))
    assert stores[0].resident_bytes() == stores[1].resident_bytes()


def test_forks_of_one_prompt_do_not_touch_each_other() -> None:
    info = PromptInfo(9, 1, 2, 1, 8)
    keys, values = torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    left, right = RequestKV(info, kv_dtype=torch.float32), RequestKV(info, kv_dtype=torch.float32)
    for store in (left, right):
        store.add_prompt(0, keys, values, None)
    left.append(0, torch.ones(2, 8), torch.ones(2, 8))
    assert right.decoded_tokens == 0
    keys.zero_()
    assert right.resident(0)[0].abs().sum() > 0


def test_layers_come_in_order() -> None:
    store = RequestKV(PromptInfo(4, 2, 1, 1, 8))
    with pytest.raises(ValueError, match="layer 0 is next"):
        store.add_prompt(1, torch.randn(1, 4, 8), torch.randn(1, 4, 8), None)


def test_values_too_large_for_the_dtype_are_told() -> None:
    store = RequestKV(PromptInfo(4, 1, 1, 1, 8))
    with pytest.raises(PaskError, match=r"do not fit into torch\.float16"):
        store.add_prompt(0, torch.full((1, 4, 8), 1e6), torch.zeros(1, 4, 8), None)


def test_check_finds_a_layer_that_fell_behind() -> None:
    store = filled(10, 2)
    store.append(1, torch.randn(3, 8), torch.randn(3, 8))
    with pytest.raises(AssertionError):
        store.check()


def test_check_finds_an_unfinished_prefill() -> None:
    store = RequestKV(PromptInfo(4, 2, 1, 1, 8))
    store.add_prompt(0, torch.randn(1, 4, 8), torch.randn(1, 4, 8), None)
    with pytest.raises(AssertionError):
        store.check()
