"""Tiny random models in the three supported layouts, saved as transformers saves real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

LAYOUTS = ("llama", "qwen2", "qwen3")
VOCAB_SIZE = 520  # a little above the tokenizer's, as in many real models

_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
_TEXT = """
You are given functions. Answer with a list of calls in JSON and nothing else.
[{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}]
[{"name": "math.area", "arguments": {"base": 10, "height": 2.5, "exact": true, "unit": null}}]
{"type": "object", "properties": {"city": {"type": "string", "description": "The city."}}}
What is the weather in Rome and in Zürich tomorrow? Find the area of a triangle, please.
"""
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_folder(tmp: Path, layout: str, seed: int = 0, **config: Any) -> Path:
    """Save a random model of `layout` with its tokenizer in a folder below `tmp`; its path.

    2 layers, 4 query and 2 kv heads of 16, hidden 64. `config` overrides keys of the config.
    Norms and biases are random too, so that leaving one out shows. About 0.1 s and 0.5 MB.
    """
    chosen = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": 2,
        "tie_word_embeddings": layout != "qwen2",
    } | config
    model = AutoModelForCausalLM.from_config(_CONFIGS[layout](**chosen))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.2 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise * (1.0 if "embed" in name else 1.5 * weight.shape[1] ** -0.5))
    folder = Path(tmp) / f"tiny-{layout}-{seed}"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of some 450 tokens: any text has ids, and comes back byte for byte."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=510,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([_TEXT], trainer)
    core.add_tokens([AddedToken(t, special=False) for t in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
