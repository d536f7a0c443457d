"""The attention benchmark says what it measured; never how fast this machine is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pask.bench import attention
from pask.cli import main
from tests.cpu.tiny import tiny_folder


def _config(folder: Path, **changes: object) -> Path:
    model = tiny_folder(folder, "llama", max_position_embeddings=512, **changes)
    raw = {
        "run": "tiny",
        "model": {
            "name": "tiny",
            "source": str(model),
            "prompt": "one_example",
            "answer_form": "json_list",
            "expected_new_tokens": {"nonlive": 40, "live": 40},
        },
        "data": {"sample": {"simple_python": 1}},
        "methods": [{"name": "full"}],
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def test_both_sides_and_both_loops_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TOKENS": 256, "HIGH_TOKENS": 51, "LOW_TOKENS": 106, "LAYERS": 2}.items():
        monkeypatch.setattr(attention, name, value)
    config = _config(tmp_path, head_dim=32)
    assert main(["bench", "attention", "--config", str(config), "--items", "3"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["n"] == 3
    assert result["ratio"] == pytest.approx(result["theirs"] / result["ours"], rel=0.02)
    for line in ("ours", "SDPA, all in fp32", "16-bit slots alone", "4-bit slots alone"):
        assert captured.err.count(f"  {line} ") == 1
    # 51 of 256 tokens at 16 bits and 106 at 5 bits, scales and zeros counted.
    assert f"{(51 * 16 + 106 * 5) / (256 * 16):.3f}" in captured.err


def test_heads_that_cannot_be_quantised_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path, head_dim=16)
    assert main(["bench", "attention", "--config", str(config)]) == 2
    assert "head_dim 16 cannot be quantised in groups of 32" in capsys.readouterr().err
