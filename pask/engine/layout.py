"""What a model folder's config.json says, checked: the shape of every tensor follows from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pask.errors import PaskError

SUPPORTED = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: `theta`, and the four constants of the llama3 form if used."""

    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int | None = None  # None: the default form, no rescaling

    def __post_init__(self) -> None:
        if self.theta <= 0 or self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("rope constants out of range")


@dataclass(frozen=True)
class ModelLayout:
    """A decoder of the Llama family, with or without QKV bias (Qwen2) and q/k norms (Qwen3)."""

    model_type: str
    layers: int
    hidden_size: int
    intermediate_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "hidden_size",
            "intermediate_size",
            "q_heads",
            "kv_heads",
            "head_dim",
            "vocab_size",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"{self.q_heads} query heads do not divide over {self.kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd")

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads


def read_layout(folder: Path) -> ModelLayout:
    """The layout of the model in `folder`, from its config.json; PaskError where it is not ours."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PaskError(
            "no readable config.json",
            where=str(folder),
            why=str(error.strerror),
            todo="give a model folder as transformers saves it",
        ) from error
    except ValueError as error:
        raise PaskError("not valid JSON", where=str(path), why=str(error)) from error
    if not isinstance(config, dict):
        raise PaskError("not a JSON object", where=str(path))
    return layout_from_config(config, where=str(path))


def layout_from_config(config: Mapping[str, Any], *, where: str) -> ModelLayout:
    """The layout that a config's keys describe; PaskError naming the key that does not fit."""
    model_type = config.get("model_type")
    if model_type not in SUPPORTED:
        raise PaskError(
            f"unknown model_type {model_type!r}",
            where=where,
            todo=f"supported: {', '.join(SUPPORTED)}",
        )
    _refuse_what_is_not_computed(config, model_type, where)
    try:
        heads = int(config["num_attention_heads"])
        return ModelLayout(
            model_type=model_type,
            layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            q_heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope=_rope(config, where),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
        )
    except KeyError as error:
        raise PaskError(f"key {error} is missing", where=where) from error
    except (TypeError, ValueError) as error:
        raise PaskError(
            "the config does not describe a model", where=where, why=str(error)
        ) from error


def _refuse_what_is_not_computed(config: Mapping[str, Any], model_type: str, where: str) -> None:
    """Refuse every key whose value changes the computation in a way this engine does not follow."""
    architectures = config.get("architectures") or []
    if any(not str(name).endswith("ForCausalLM") for name in architectures):
        raise PaskError(f"architectures {architectures} is no causal language model", where=where)
    plain = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False, None),
        "attention_bias": (False, None) if model_type != "qwen2" else (False, True, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
    }
    for key, allowed in plain.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise PaskError(
                f"{key} = {value!r} is not supported",
                where=where,
                why=f"a {model_type} model is computed with {key} = {allowed[0]!r}",
            )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise PaskError(
            f"layer_types {sorted(kinds)} are not supported",
            where=where,
            why="every layer must be full_attention",
        )


def _rope(config: Mapping[str, Any], where: str) -> Rope:
    """RoPE constants from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = given.get("rope_type", given.get("type", "default"))
    theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or share not in (1, None):
        what = f"rope type {kind!r}" if share in (1, None) else f"partial_rotary_factor {share}"
        raise PaskError(f"{what} is not supported", where=where, todo="supported: default, llama3")
    if kind == "default":
        return Rope(theta)
    return Rope(
        theta,
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_positions=int(given["original_max_position_embeddings"]),
    )
