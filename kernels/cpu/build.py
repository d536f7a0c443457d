"""Compiles the native operations: `python -m kernels.cpu.build`.

The library lies beside its source under the digest of that source, so that an edit is never met by
an old library, and it knows by what it was compiled.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "src"
NEEDED = ("avx2", "fma", "f16c")
"""What the CPU must be able to do, in the words of /proc/cpuinfo."""

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread"),
    *(f"-m{feature}" for feature in NEEDED),
    "-ffp-contract=off",  # the source says which operations are fused: every compiler, same bits
)


class Unavailable(RuntimeError):
    """The native operations cannot be had here; says what, why, and what to do."""


def library() -> Path:
    """The compiled library, compiled now if need be. Raises Unavailable where it cannot be."""
    _check_cpu()
    for folder in _folders():
        if (built := folder / _file_name()).is_file():
            return built
    return build()


def build() -> Path:
    """Compile, and put the library where `library` finds it. Raises Unavailable."""
    _check_cpu()
    compiler = _compiler()
    folder = next((folder for folder in _folders() if _writable(folder)), None)
    if folder is None:
        raise Unavailable(
            f"no folder to keep the compiled kernels in: {', '.join(map(str, _folders()))} "
            "cannot be written; set XDG_CACHE_HOME to one that can"
        )
    # Compiled under another name: two processes may build at once, and neither sees half a file.
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [*compiler, *FLAGS, *map(str, _sources(".cpp")), "-o", unfinished]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "")
            raise Unavailable(
                f"{compiler[0]} cannot compile the kernels: {first.strip() or done.returncode}; "
                "set CXX to a C++17 compiler"
            )
        os.chmod(unfinished, 0o755)
        os.replace(unfinished, folder / _file_name())
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return folder / _file_name()


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in SOURCE.iterdir() if path.suffix in suffixes)


@cache
def _file_name() -> str:
    text = hashlib.sha256(" ".join(FLAGS).encode())
    for path in _sources(".cpp", ".hpp"):
        text.update(path.name.encode() + path.read_bytes())
    return f"kernels-{text.hexdigest()[:16]}.so"


def _folders() -> tuple[Path, Path]:
    """Where a library may lie: beside the source, or in the user's cache if that is read-only."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(__file__).parent / "_built", cached / "pask-bench" / "kernels"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _compiler() -> list[str]:
    given = os.environ.get("CXX", "").split()
    for command in [given] if given else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    what = f"CXX={given[0]} is no program" if given else "no C++ compiler (g++, clang++)"
    raise Unavailable(f"{what}; install g++, or set CXX")


def _check_cpu() -> None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    if missing := [feature for feature in NEEDED if feature not in flags]:
        raise Unavailable(
            f"this CPU ({platform.machine()}) does not say it has {', '.join(missing)}; "
            "nothing to do, or use another machine"
        )


def main() -> int:
    """Build, and say where; a failure is one line and no error: plain torch computes the same."""
    try:
        print(f"kernels: {library()}")
    except Unavailable as reason:
        print(f"kernels: not compiled, plain torch will be used: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
