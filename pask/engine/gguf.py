"""GGUF files: dequantised once into a model folder that loads in a second ever after."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from pask.engine.digests import file_sha256, folder_digest
from pask.engine.folders import appearing
from pask.engine.layout import ModelLayout, read_layout
from pask.engine.weights import check_tensors
from pask.errors import PaskError

_FORM = 1  # raise it when a conversion would write other files than before
_DIGEST = "digest"

_MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def converted_folder(path: Path, cache: Path, sha256: str | None) -> tuple[Path, str]:
    """The model folder made from the GGUF file `path`, and its digest; made at the first call.

    The folder's name holds the file's sha256, and it appears whole or not at all. PaskError where
    the file is broken, of an unknown layout, or its sha256 is not the one asked for.
    """
    found = file_sha256(path)
    if sha256 not in (None, found):
        raise PaskError(
            f"the sha256 is {found}",
            where=str(path),
            why=f"asked for: {sha256}",
            todo="fetch the file again",
        )
    folder = cache / "models" / f"{path.stem}-{found[:16]}-{_FORM}"
    with appearing(folder) as part:
        if part is not None:
            _convert(path, part)
            (part / _DIGEST).write_text(folder_digest(part), encoding="ascii")
    return folder, (folder / _DIGEST).read_text(encoding="ascii")


def _convert(path: Path, part: Path) -> None:
    """Write the model of the GGUF file `path` into the empty folder `part`."""
    try:
        reader = GGUFReader(path)
        _config(reader, path).save_pretrained(part)
        layout = read_layout(part)
        save_file(_tensors(reader, layout, path), part / "model.safetensors", {"format": "pt"})
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(part)
        _drop_unused_tokens(reader, part / "tokenizer.json")
    except PaskError:
        raise
    except Exception as error:  # whatever the parsers of a broken file raise, in one line
        raise PaskError(
            "not a readable GGUF file",
            where=str(path),
            why=f"{type(error).__name__}: {error}",
            todo="fetch the file again; llama, qwen2 and qwen3 models are supported",
        ) from error


def _drop_unused_tokens(reader: GGUFReader, path: Path) -> None:
    """Take the padding entries ([PAD151665] ...) out of a vocabulary: no text means them."""
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    unused = {token for token, kind in enumerate(kinds) if kind == TokenType.UNUSED}
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {k: v for k, v in vocabulary.items() if v not in unused}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _config(reader: GGUFReader, path: Path) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    head_dim = reader.get_field(f"{config.model_type}.attention.key_length")
    if head_dim is not None:  # transformers passes over it for some layouts
        config.head_dim = int(head_dim.contents())
    return config


def _tensors(reader: GGUFReader, layout: ModelLayout, path: Path) -> dict[str, torch.Tensor]:
    """Every tensor dequantised to fp32, under its name and in its order of rows in a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for found in reader.tensors:
        tensor = torch.tensor(dequantize(found.data, found.tensor_type), dtype=torch.float32)
        if layout.model_type == "llama" and ".attn_q." in found.name:
            tensor = _half_split(tensor, layout.q_heads)
        elif layout.model_type == "llama" and ".attn_k." in found.name:
            tensor = _half_split(tensor, layout.kv_heads)
        tensors[_folder_name(found.name)] = tensor
    check_tensors(layout, {name: tensor.shape for name, tensor in tensors.items()}, str(path))
    return tensors


def _folder_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_MODEL_NAMES.get(part, part)}.{kind}"
    return f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{kind}"


def _half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of q and k rows: RoPE pairs lie side by side there (2i, 2i + 1),
    and half a head apart (i, i + head_dim / 2) in a folder."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
