"""Which body of the kernels a process gets, and how the native one is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernels
from kernels import bodies
from kernels.cpu import build, library
from tests.cpu.kernel_cases import load_body


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process that has not chosen a body yet."""

    def forget() -> None:
        bodies.operations.cache_clear()
        library.loaded.cache_clear()

    forget()
    monkeypatch.delenv("PASK_KERNELS", raising=False)
    yield monkeypatch
    forget()


@pytest.fixture
def unbuilt(undecided: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """One whose native kernels have not been built, on a CPU that could run them."""
    load_body("cpu")
    library.loaded.cache_clear()
    undecided.setattr(build, "_folders", lambda: (tmp_path / "built",))
    return undecided


def test_the_native_body_names_its_build(undecided: pytest.MonkeyPatch) -> None:
    load_body("cpu")
    name, built = kernels.body()
    assert name == "cpu"
    digest, _, compiler = built.partition("-")
    assert len(digest) == 16
    assert compiler


def test_plain_torch_can_be_forced(
    undecided: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    undecided.setenv("PASK_KERNELS", "torch")
    assert kernels.body() == ("torch", torch.__version__)
    assert bodies.operations("cuda").__name__ == "kernels.reference"
    assert not capfd.readouterr().err


def test_an_unknown_body_is_refused(undecided: pytest.MonkeyPatch) -> None:
    undecided.setenv("PASK_KERNELS", "fast")
    with pytest.raises(ValueError, match="'fast' is unknown: torch or cpu"):
        kernels.body()


def test_without_a_compiler_one_line_says_so_and_torch_computes(
    unbuilt: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unbuilt.setenv("CXX", "/no/such/compiler")
    for _ in range(2):
        kernels.window_mass(torch.ones(1, 3, 8), torch.ones(1, 3, 8), 2)
    assert kernels.body().name == "torch"
    (line,) = capfd.readouterr().err.splitlines()
    assert "CXX=/no/such/compiler is no program; install g++, or set CXX" in line
    bodies.operations.cache_clear()
    unbuilt.setenv("PASK_KERNELS", "cpu")
    with pytest.raises(RuntimeError, match="PASK_KERNELS=cpu, but there is no native kernel"):
        kernels.body()


def test_a_cpu_that_cannot_is_told_before_anything_is_compiled(
    unbuilt: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unbuilt.setattr(build, "NEEDED", ("avx2", "no-such-feature"))
    assert kernels.body().name == "torch"
    assert "does not say it has no-such-feature" in capfd.readouterr().err


def test_a_failing_build_fails_no_set_up(
    unbuilt: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = _script(tmp_path / "compiler", "echo 'append.cpp:1:1: error: no C++' >&2; exit 1")
    unbuilt.setenv("CXX", str(broken))
    assert build.main() == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert "append.cpp:1:1: error: no C++" in line
    assert not list((tmp_path / "built").iterdir())


def test_two_processes_may_build_at_once_and_an_edit_asks_for_a_new_build(tmp_path: Path) -> None:
    """With a stand-in for the compiler: what is tested is who writes where."""
    load_body("cpu")
    folder = tmp_path / "cpu"
    shutil.copytree(build.SOURCE, folder / "src")
    shutil.copy(build.__file__, folder)
    compiler = _script(
        tmp_path / "compiler",
        'sleep 0.5; while [ "$1" != -o ]; do shift; done; echo made > "$2"',
    )

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(folder / "build.py")],
            env={**os.environ, "CXX": str(compiler)},
            stdout=subprocess.PIPE,
            text=True,
        )

    both = [started(), started()]
    first, second = (process.communicate()[0] for process in both)
    assert first == second
    (only,) = (folder / "_built").iterdir()
    assert str(only) in first
    assert only.read_text() == "made\n"
    header = folder / "src" / "common.hpp"
    header.write_text(header.read_text() + "// edited\n")
    assert started().communicate()[0] != first
    assert len(list((folder / "_built").iterdir())) == 2


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
