"""Folders that appear whole or not at all, whoever else makes them at the same time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pask.engine.folders import appearing


def test_one_of_many_makes_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "sub" / "made"

    def make(worker: int) -> bool:
        with appearing(target) as part:
            if part is None:
                return False
            (part / "one").write_text(str(worker))
            time.sleep(0.05)
            assert not target.exists()
            (part / "two").write_text(str(worker))
            return True

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make, range(4)))
    assert sum(made) == 1
    assert (target / "one").read_text() == (target / "two").read_text() == str(made.index(True))
    assert sorted(p.name for p in target.parent.iterdir()) == ["made", "made.lock"]


def test_a_failure_leaves_nothing_and_the_next_can_try(tmp_path: Path) -> None:
    target = tmp_path / "made"

    def fail(part: Path | None) -> None:
        assert part is not None
        (part / "one").write_text("1")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"), appearing(target) as part:
        fail(part)
    assert [p.name for p in tmp_path.iterdir()] == ["made.lock"]
    with appearing(target) as part:
        assert part is not None
    assert target.is_dir()
