"""Small trained tokenizers of the kinds that models come with."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import xgrammar as xgr
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from pask.bfcl.grammar import tokenizer_info
from tests.cpu.test_prompts import TEMPLATES

CORPUS = [
    '{"name": "get_weather", "description": "Año: 東京 😀.", "parameters": {"type": "any"}}',
    "user\nDim the lamp in Zürich or Zu\u0308rich, señor. ",
] * 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
LLAMA = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def byte_level(normalizer: Any = None, prefix: bool = False, trim: bool = False) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.post_processor = processors.ByteLevel(add_prefix_space=prefix, trim_offsets=trim)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(backend, trainers.BpeTrainer(initial_alphabet=alphabet, **SMALL))
    return backend


def byte_fallback(normalizer: Any, splits: Any, decoder: list[Any]) -> Tokenizer:
    backend = Tokenizer(models.BPE(byte_fallback=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if splits is not None:
        backend.pre_tokenizer = splits
    backend.decoder = decoders.Sequence(decoder)
    trained(backend, trainers.BpeTrainer(special_tokens=BYTES, **SMALL))
    content = json.loads(backend.to_str())
    content["added_tokens"] = []  # the trainer takes the bytes for control tokens
    return Tokenizer.from_str(json.dumps(content))


def metaspace() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trained(backend, trainers.BpeTrainer(special_tokens=["<unk>"], **SMALL))
    return backend


def word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trained(backend, trainers.WordPieceTrainer(special_tokens=["[UNK]"], **SMALL))
    return backend


SMALL: dict[str, Any] = {"vocab_size": 900, "min_frequency": 2, "show_progress": False}


def trained(backend: Tokenizer, trainer: Any) -> None:
    backend.train_from_iterator(CORPUS, trainer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, offsets trimmed": lambda: byte_level(trim=True),
    "byte level, blank before": lambda: byte_level(prefix=True),
    "byte level, composed": lambda: byte_level(normalizers.NFC()),
    "SentencePiece as Llama has it": lambda: byte_fallback(
        LLAMA, None, [*SENTENCEPIECE, decoders.Strip(" ", 1, 0)]
    ),
    "SentencePiece as Gemma has it": lambda: byte_fallback(
        normalizers.Replace(" ", "▁"), None, SENTENCEPIECE
    ),
    "metaspace with bytes": lambda: byte_fallback(
        None, pre_tokenizers.Metaspace(), [decoders.Metaspace(), decoders.ByteFallback()]
    ),
    "metaspace": metaspace,
    "word piece": word_piece,
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    backend = KINDS[kind]()
    backend.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATES["system_tools"]
    return tokenizer


def info_of(tokenizer: PreTrainedTokenizerFast) -> xgr.TokenizerInfo:
    return tokenizer_info(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
