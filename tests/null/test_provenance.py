"""Digests: equal for equal things, different as soon as something that decides changes."""

from pathlib import Path

import pytest

from pask import digests, provenance


def test_canonical_does_not_depend_on_key_order() -> None:
    assert digests.canonical({"b": 1, "a": [1, "é"]}) == '{"a":[1,"é"],"b":1}'
    assert digests.digest({"b": 1, "a": 2}) == digests.digest({"a": 2, "b": 1})


def names(*modules: str) -> set[str]:
    return {str(path.relative_to(provenance.PROJECT)) for path in provenance.closure(*modules)}


def test_the_closure_follows_imports_and_takes_data_files() -> None:
    files = names("pask.bfcl.splits")
    assert {"pask/bfcl/splits.py", "pask/bfcl/data.py", "pask/bfcl/digests.json"} <= files
    assert not any(name.startswith(("pask/report", "pask/engine", "baselines")) for name in files)


def test_results_do_not_depend_on_report_code() -> None:
    files = names("pask.evaluation.run")
    assert "pask/engine/decode.py" in files
    assert not any(name.startswith("pask/report") for name in files)


def test_a_baseline_belongs_to_its_own_closure_only() -> None:
    assert "baselines/snapkv.py" in names("baselines.snapkv")
    assert "baselines/snapkv.py" not in names("pask.evaluation.run")


def test_the_source_digest_changes_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pask").mkdir()
    (tmp_path / "pask/__init__.py").write_text("")
    (tmp_path / "pask/a.py").write_text("import pask.b\n")
    (tmp_path / "pask/b.py").write_text("x = 1\n")
    (tmp_path / "pask/c.py").write_text("x = 1\n")
    monkeypatch.setattr(provenance, "PROJECT", tmp_path)
    provenance.source_digest.cache_clear()

    def now() -> str:
        provenance.source_digest.cache_clear()
        return provenance.source_digest("pask.a")

    before = now()
    (tmp_path / "pask/c.py").write_text("x = 2\n")
    assert now() == before
    (tmp_path / "pask/b.py").write_text("x = 2\n")
    assert now() != before
    provenance.source_digest.cache_clear()
