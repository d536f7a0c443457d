"""Digests that decide whether a result is still valid, and the manifest that goes with it."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pask.paths import PROJECT

_OWN = ("pask", "baselines", "kernels")
_DECISIVE_PACKAGES = ("torch", "transformers", "tokenizers", "xgrammar", "bfcl-eval")


def _file_of(module: str) -> Path | None:
    """The file of one of our own modules; None for others and for names that are no module."""
    if module.partition(".")[0] not in _OWN:
        return None
    base = PROJECT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imports(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def closure(*modules: str) -> tuple[Path, ...]:
    """The modules' own files and all of ours that they import, however deeply; sorted.

    Read from the source text, so that nothing has to be imported to know it. JSON files that lie
    beside a module of the closure count as its data.
    """
    seen: set[Path] = set()
    waiting = [path for module in modules if (path := _file_of(module))]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        waiting += [found for name in _imports(path) if (found := _file_of(name))]
    data = {found for path in seen for found in path.parent.glob("*.json")}
    return tuple(sorted(seen | data))


@cache
def source_digest(*modules: str) -> str:
    """sha256 (16 hex digits) over the text of `closure(*modules)`: edit one of them and every
    result of it is stale; edit any other file and none is."""
    total = hashlib.sha256()
    for path in closure(*modules):
        total.update(str(path.relative_to(PROJECT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of the packages that can change a result, without local build tags."""
    return {name: importlib.metadata.version(name) for name in _DECISIVE_PACKAGES}


def machine() -> str:
    """A short name of the hardware, e.g. 'AMD EPYC, 2 cores, no GPU'."""
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the architecture's name stays
    gpu = "no GPU"
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_name()
    return f"{name}, {os.cpu_count()} cores, {gpu}"


def revision() -> str:
    """The checkout's commit, with '+dirty' where tracked files differ; 'unknown' outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = "+dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
