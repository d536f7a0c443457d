"""Which configs are understood, and how the others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pask.engine.layout import Rope, layout_from_config, read_layout
from pask.engine.rope import inverse_frequencies
from pask.errors import PaskError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def test_an_older_llama_config_is_read() -> None:
    layout = layout_from_config(LLAMA, where="config.json")
    assert (layout.layers, layout.head_dim, layout.group_size) == (3, 16, 2)
    assert layout.rope == Rope(500000.0)
    assert not layout.tied_embeddings
    assert not layout.qkv_bias
    assert not layout.qk_norm


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_configs_as_transformers_writes_them_are_read(config_class: Any, tmp_path: Path) -> None:
    config_class(tie_word_embeddings=True, max_position_embeddings=99).save_pretrained(tmp_path)
    layout = read_layout(tmp_path)
    assert layout.tied_embeddings
    assert layout.max_positions == 99
    assert layout.qkv_bias == (config_class is Qwen2Config)
    assert layout.qk_norm == (config_class is Qwen3Config)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama3_rope_in_both_spellings(key: str) -> None:
    given = {**LLAMA, key: {**LLAMA3, "rope_type": "llama3", "rope_theta": 500000.0}}
    rope = layout_from_config(given, where="").rope
    assert rope == Rope(500000.0, 8.0, 1.0, 4.0, 256)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_llama3_frequencies_are_those_of_transformers(head_dim: int) -> None:
    rope_parameters = {**LLAMA3, "rope_type": "llama3", "rope_theta": 10000.0}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope_parameters)
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](config)
    assert scale == 1.0
    ours = inverse_frequencies(Rope(10000.0, 8.0, 1.0, 4.0, 256), head_dim)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mistral"}, "supported: llama, qwen2, qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal language model"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"hidden_size": "wide"}, "does not describe a model"),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(PaskError) as caught:
        layout_from_config({**LLAMA, **changes}, where="m/config.json")
    assert told in str(caught.value)
    assert str(caught.value).startswith("m/config.json: ")
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(PaskError, match="'vocab_size' is missing"):
        layout_from_config({k: v for k, v in LLAMA.items() if k != "vocab_size"}, where="")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PaskError, match=r"config\.json: not "):
        read_layout(tmp_path)


def test_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(PaskError, match=r"no readable config\.json"):
        read_layout(tmp_path)


def test_old_configs_may_lack_head_dim_and_kv_heads(tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": None}))
    layout = read_layout(tmp_path)
    assert (layout.kv_heads, layout.head_dim) == (4, 16)
