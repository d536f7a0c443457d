"""The Triton kernels without a GPU: interpreted against the common grid, and compiled.

Both happen in processes of their own, since how triton works is settled when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (CPU builds of torch lack it)"
)

ROOT = Path(__file__).parents[2]
GRID = "tests/cpu/triton_interpreted.py"

QUICK = (
    "test_attention[bf16 only]",
    "test_attention[low8 only]",
    "test_attention[head_dim 96, group 7]",
    "test_attention[head_dim 80, no low region]",
    "test_attention[empty regions beside one low slot]",
    "test_attention[every width at once]",
    "test_attention[groups of tokens, head_dim 96, group 4]",
    "test_attention[chosen slots]",
    "test_neither_company_nor_a_wider_table_changes_a_bit",
    "test_large_and_small_numbers_lose_nothing",
    "test_pages_that_no_kernel_reads_are_refused",
    "test_append_high[80-bf16]",
    "test_append_low_to_the_bit[True-3]",
    "test_append_low_to_the_bit[False-4]",
    "test_append_bounds[5-fp16]",
    "test_choose_slots[3-16-20]",
    "test_window_mass[8-6-2-5]",
    "test_column_mass[4-2-37]",
)
"""What the interpreter, at milliseconds an instruction, has done in some ten seconds."""


def _succeeds(*command: str, **environment: str) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


def _interpreted(*tests: str) -> None:
    release = [int(part) for part in metadata.version("triton").split(".")[:2]]
    if release < [3, 7]:
        pytest.skip("the interpreter of triton 3.6 does not run with numpy 2.4")
    _succeeds("-m", "pytest", "-p", "no:cacheprovider", *tests, TRITON_INTERPRET="1")


def test_interpreted() -> None:
    _interpreted(*(f"{GRID}::{test}" for test in QUICK))


@pytest.mark.slow
def test_interpreted_on_the_whole_grid() -> None:
    _interpreted(GRID)


def test_every_kernel_compiles(tmp_path: Path) -> None:
    _succeeds("-m", "tests.cpu.triton_compiled", "90", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90"])
def test_every_shape_compiles(capability: str, tmp_path: Path) -> None:
    command = ("-m", "tests.cpu.triton_compiled", capability, "full")
    _succeeds(*command, TRITON_CACHE_DIR=str(tmp_path))
