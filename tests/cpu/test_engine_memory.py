"""What the engine takes on a real model, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PREFILL = """
import resource, sys
import torch
from pask.engine.decode import new_store
from pask.engine.embedded import EMBEDDED
from pask.engine.loading import load_model

torch.set_num_threads(1)
model = load_model(EMBEDDED)
store = new_store(model, seats=64, capacity_tokens=65_536)
seats = [store.open(1000) for _ in range(64)]
ids = [7 + 3 * n for n in range(1000)]

def place(layer, q, k, v):
    for n, seat in enumerate(seats):  # a copy each, as of 64 different prompts
        store.add_prompt([seat], layer, k + n, v - n, None)

model.transformer.prefill(ids, place)
held = sum(used for used, _ in store.pool_bytes().values())
peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(held, peak)
"""


@pytest.mark.slow
def test_64_prefilled_requests_of_1000_tokens_take_less_than_4_gb() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PREFILL], capture_output=True, text=True, check=True
    )
    held, peak = map(int, done.stdout.split())
    token = 30 * 3 * 2 * 64 * 2  # layers, kv heads, key and value, head_dim, bytes
    assert held == 64 * 1008 * token  # 1,000 tokens in pages of 16
    assert held < peak < 4e9
