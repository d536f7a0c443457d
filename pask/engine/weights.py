"""A model's weights: which tensors a layout needs, read from safetensors and fused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pask.engine.layout import ModelLayout
from pask.errors import PaskError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_RECOMPUTED = "rotary_emb.inv_freq"  # a buffer that old files carry; it follows from the config


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, fp32; matrices are [out, in]."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(q_heads + 2 kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    out: torch.Tensor  # [hidden, q_heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True)
class Weights:
    """A whole model, fp32; `head` is `embedding` itself where the two are tied."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]


def expected_shapes(layout: ModelLayout) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a folder of this layout must hold."""
    hidden, inner = layout.hidden_size, layout.intermediate_size
    q_width, kv_width = layout.q_heads * layout.head_dim, layout.kv_heads * layout.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (layout.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not layout.tied_embeddings:
        shapes["lm_head.weight"] = (layout.vocab_size, hidden)
    for layer in range(layout.layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_width, hidden),
            "self_attn.k_proj.weight": (kv_width, hidden),
            "self_attn.v_proj.weight": (kv_width, hidden),
            "self_attn.o_proj.weight": (hidden, q_width),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if layout.qkv_bias:
            of_layer["self_attn.q_proj.bias"] = (q_width,)
            of_layer["self_attn.k_proj.bias"] = (kv_width,)
            of_layer["self_attn.v_proj.bias"] = (kv_width,)
        if layout.qk_norm:
            of_layer["self_attn.q_norm.weight"] = (layout.head_dim,)
            of_layer["self_attn.k_norm.weight"] = (layout.head_dim,)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in the order of their names; PaskError if none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise PaskError("not a safetensors index", where=str(index), why=str(error)) from error
        files = [folder / name for name in names if Path(name).name == name]
        lost = [name for name in names if not (folder / name).is_file()]
        if lost or len(files) < len(names):
            raise PaskError(
                f"the index names {', '.join(lost) or names}, not in the folder",
                where=str(index),
                todo="fetch the missing weight files",
            )
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise PaskError(
            f"only pickled weights ({pickles[0]})",
            where=str(folder),
            why="a pickle can run code, so it is not read",
            todo="save the model as safetensors",
        )
    raise PaskError(
        "no model.safetensors",
        where=str(folder),
        todo="give a model folder as transformers saves it",
    )


def check_tensors(layout: ModelLayout, found: Mapping[str, Sequence[int]], where: str) -> None:
    """PaskError where a tensor is missing, unexpected or of another shape; `found` has shapes."""
    needed = expected_shapes(layout)
    missing = [name for name in needed if name not in found]
    if missing:
        raise PaskError(
            f"tensor {missing[0]} is missing ({len(missing)} in all)",
            where=where,
            why=f"a {layout.model_type} model needs it",
        )
    tied_copy = {"lm_head.weight"} if layout.tied_embeddings else set()
    extra = sorted(found.keys() - needed.keys() - tied_copy)
    extra = [name for name in extra if not name.endswith(_RECOMPUTED)]
    if extra:
        raise PaskError(
            f"unexpected tensor {extra[0]} ({len(extra)} in all)",
            where=where,
            why=f"a {layout.model_type} model has no such tensor",
        )
    for name, shape in needed.items():
        if tuple(found[name]) != shape:
            raise PaskError(
                f"tensor {name} has shape {list(found[name])}",
                where=where,
                why=f"the config asks for {list(shape)}",
            )


def read_weights(folder: Path, layout: ModelLayout) -> Weights:
    """Read, check and fuse the weights in `folder`.

    Tensors that need no fusing and lie there as fp32 stay mapped from the file, so that two
    processes share their memory. PaskError where the tensors are not those of the layout, one is
    of a quantised or integer type, or a file is broken.
    """
    with ExitStack() as stack:
        holders: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise PaskError(
                    "not a readable safetensors file",
                    where=str(path),
                    why=str(error),
                    todo="fetch the file again",
                ) from error
            holders |= dict.fromkeys(opened.keys(), opened)
        shapes = {name: holder.get_slice(name).get_shape() for name, holder in holders.items()}
        check_tensors(layout, shapes, str(folder))

        def read(name: str) -> torch.Tensor:
            tensor: torch.Tensor = holders[name].get_tensor(name)
            if tensor.dtype not in _DTYPES:
                raise PaskError(
                    f"tensor {name} is {tensor.dtype}",
                    where=str(folder),
                    todo="save the model with 16- or 32-bit floats",
                )
            return tensor.to(torch.float32)

        embedding = read("model.embed_tokens.weight")
        return Weights(
            embedding=embedding,
            layers=tuple(_read_layer(n, layout, read) for n in range(layout.layers)),
            final_norm=read("model.norm.weight"),
            head=embedding if layout.tied_embeddings else read("lm_head.weight"),
        )


def _read_layer(
    layer: int, layout: ModelLayout, read_model: Callable[[str], torch.Tensor]
) -> LayerWeights:
    def read(name: str) -> torch.Tensor:
        return read_model(f"model.layers.{layer}.{name}")

    def fused(module: str, parts: tuple[str, ...], kind: str) -> torch.Tensor:
        return torch.cat([read(f"{module}.{part}_proj.{kind}") for part in parts])

    return LayerWeights(
        attention_norm=read("input_layernorm.weight"),
        qkv=fused("self_attn", ("q", "k", "v"), "weight"),
        qkv_bias=fused("self_attn", ("q", "k", "v"), "bias") if layout.qkv_bias else None,
        q_norm=read("self_attn.q_norm.weight") if layout.qk_norm else None,
        k_norm=read("self_attn.k_norm.weight") if layout.qk_norm else None,
        out=read("self_attn.o_proj.weight"),
        mlp_norm=read("post_attention_layernorm.weight"),
        gate_up=fused("mlp", ("gate", "up"), "weight"),
        down=read("mlp.down_proj.weight"),
    )
