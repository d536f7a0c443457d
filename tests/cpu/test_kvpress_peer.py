"""SnapKV keeps the tokens that NVIDIA's kvpress keeps, where both are given the same settings.

kvpress averages where it pools, and keeps a share of the tokens rounded down. It runs on the
attention modules of transformers, and shares the weights' file with our engine and nothing else:
what it kept is read from its cache. It needs an environment of its own (README.md); elsewhere
these tests are skipped.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from baselines.snapkv import SnapKV
from kernels import window_mass
from pask.engine.loading import load_model
from pask.methods.contract import Captures, PromptInfo
from pask.methods.levels import Level
from tests.cpu.tiny import LAYOUTS, tiny_folder

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not in this environment (see README.md)"
)

pytestmark = pytest.mark.slow

Kept = list[list[list[int]]]
"""By layer and kv head, ascending."""


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), request.param, seed=3)


def kept_by_kvpress(folder: Path, ids: list[int], share: float, window: int, kernel: int) -> Kept:
    """Each key of the pressed cache is looked up in that of the same prompt without a press."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole, pressed = DynamicCache(), DynamicCache()
    press = kvpress.SnapKVPress(compression_ratio=1 - share, window_size=window, kernel_size=kernel)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=whole)
        with press(model):
            model(torch.tensor([ids]), past_key_values=pressed)
    found: Kept = []
    for all_of, some in zip(whole.layers, pressed.layers, strict=True):
        same = (some.keys[0][:, :, None] == all_of.keys[0][:, None]).all(-1)
        assert bool((same.sum(-1) == 1).all()), "a kept key is not one key of the prompt"
        found.append(same.long().argmax(-1).sort(-1).values.tolist())
    return found


def kept_by_us(folder: Path, ids: list[int], method: SnapKV) -> Kept:
    model = load_model(str(folder))
    layout = model.layout
    info = PromptInfo(len(ids), layout.layers, layout.kv_heads, layout.group_size, layout.head_dim)
    state = method.open(info)
    assert state.notes == ()
    found: Kept = []

    def place(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        mass = window_mass(q, k, state.wants.window_queries)
        tokens = state.place(layer, Captures(window_mass=mass)).tokens
        assert tokens is not None
        found.append(tokens[Level.HIGH].tolist())

    model.transformer.prefill(ids, place)
    return found


@pytest.mark.parametrize(("window", "kernel"), [(16, 5), (8, 7), (1, 1)])
@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize("prompt", [128, 300])
def test_the_kept_sets_are_equal(
    folder: Path, prompt: int, share: float, window: int, kernel: int
) -> None:
    draw = random.Random(prompt)
    ids = [draw.randrange(3, 440) for _ in range(prompt)]
    method = SnapKV(budget=share, window=window, kernel=kernel, pooling="avg")
    ours = kept_by_us(folder, ids, method)
    assert ours == kept_by_kvpress(folder, ids, share, window, kernel)
    assert {len(head) for layer in ours for head in layer} == {int(prompt * share)}
    assert len({tuple(head) for layer in ours for head in layer}) == 4  # no two alike
