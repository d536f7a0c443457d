"""Loading model folders: what is read, and one clear line for each thing that can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pask.engine.loading import load_model, tokenizer_info
from pask.errors import PaskError
from tests.cpu.tiny import LAYOUTS, tiny_folder

IDS = [5, 90, 301, 7, 44, 260]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny-qwen3"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_loads(layout: str, tmp_path: Path) -> None:
    model = load_model(str(tiny_folder(tmp_path, layout)))
    assert model.name == f"tiny-{layout}-0"
    assert model.layout.model_type == layout
    assert model.stop_token_ids == (2,)
    assert len(model.digest) == 64
    info = tokenizer_info(model)
    assert info.vocab_size == model.layout.vocab_size
    assert info.stop_token_ids == [2]
    text = 'Zürich {"a": 1}\n<tool_call> 🐫  !'
    ids = model.tokenizer(text)["input_ids"]
    vocabulary = info.decoded_vocab
    assert b"".join(vocabulary[token] for token in ids).decode() == text


def test_a_sharded_folder_is_the_same_model(folder: Path) -> None:
    whole = load_model(str(folder))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_model(str(folder))
    assert torch.equal(sharded.transformer.all_logits(IDS), whole.transformer.all_logits(IDS))
    assert sharded.digest != whole.digest
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PaskError, match="the index names model-00002-of-00002"):
        load_model(str(folder))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_computed_in_fp32(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda t: t.update({name: x.to(dtype) for name, x in t.items()}))
    half = load_model(str(folder)).transformer.all_logits(IDS)
    rewrite(folder, lambda t: t.update({name: x.float() for name, x in t.items()}))
    assert half.dtype == torch.float32
    assert torch.equal(half, load_model(str(folder)).transformer.all_logits(IDS))


def test_the_digest_sees_weights_config_and_tokenizer(folder: Path) -> None:
    digests = {load_model(str(folder)).digest}
    rewrite(folder, lambda t: t["model.norm.weight"].add_(1e-3))
    digests.add(load_model(str(folder)).digest)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        path.write_text(path.read_text() + "\n")
        digests.add(load_model(str(folder)).digest)
    assert len(digests) == 6
    (folder / "README.md").write_text("not part of the model")
    assert load_model(str(folder)).digest in digests


def test_the_digest_can_be_pinned(folder: Path) -> None:
    digest = load_model(str(folder)).digest
    assert load_model(str(folder), sha256=digest).digest == digest
    with pytest.raises(PaskError, match=f"the digest is {digest}"):
        load_model(str(folder), sha256="0" * 64)


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(PaskError, match=r"no tokenizer\.json"):
        load_model(str(folder))


def test_stop_tokens_come_from_the_generation_config_too(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_model(str(folder)).stop_token_ids == (0, 2)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda t: t.pop(name))


def put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda t: t.update({name: tensor}))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def small_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (drop(QUERY), rf"tensor {QUERY} is missing \(1 in all\)"),
        (
            put(QUERY, torch.zeros(64, 32)),
            rf"{QUERY} has shape \[64, 32\]; the config asks for \[64, 64\]",
        ),
        (put(QUERY, torch.zeros(64, 64, dtype=torch.int8)), rf"{QUERY} is torch.int8"),
        (put("model.extra.weight", torch.zeros(3)), r"unexpected tensor model\.extra\.weight"),
        (truncate, r"model\.safetensors: not a readable safetensors file"),
        (only_pickle, r"only pickled weights \(pytorch_model\.bin\)"),
        (lambda f: (f / "model.safetensors").unlink(), r"no model\.safetensors"),
        (lambda f: (f / "config.json").unlink(), r"no readable config\.json"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "the tokenizer does not load"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("{}"),
            "not a safetensors index",
        ),
        (small_vocabulary, "the tokenizer has 445 tokens, the model 300"),
    ],
)
def test_a_damaged_folder_is_told_in_one_line(
    folder: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(folder)
    with pytest.raises(PaskError, match=told) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    assert "tiny-qwen3" in str(caught.value)


def test_an_index_cannot_reach_outside_its_folder(folder: Path) -> None:
    index = {"weight_map": {"a": "../tiny-qwen3/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PaskError, match="the index names"):
        load_model(str(folder))


def test_a_tied_copy_of_the_head_is_no_surprise(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    before = load_model(str(folder)).transformer.all_logits(IDS)
    rewrite(folder, add)
    assert torch.equal(load_model(str(folder)).transformer.all_logits(IDS), before)


@pytest.mark.parametrize("source", ["/no/such/folder", "no-such-folder", "./a/b", "x.gguf"])
def test_a_source_that_is_not_there(source: str) -> None:
    with pytest.raises(PaskError) as caught:
        load_model(source)
    assert "no such model; give a model folder" in str(caught.value)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(PaskError, match=r"neither a model folder nor a \.gguf file"):
        load_model(str(tmp_path / "model.txt"))


def test_a_hub_model_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PaskError) as caught:
        load_model("some-owner/some-model", revision="main")
    line = str(caught.value)
    assert line.startswith("some-owner/some-model@main: the hub does not give this model")
    assert "give a local folder or .gguf file" in line
    assert "\n" not in line
