"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def appearing(target: Path) -> Iterator[Path | None]:
    """An empty folder that becomes `target` when the block ends well; None if that is there.

    One process at a time works on a target; the others wait and then find it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            yield None
            return
        part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            yield part
            part.chmod(0o755)
            os.replace(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
