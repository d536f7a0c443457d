"""The vocabularies of two real tokenizers, as xgrammar sees them, and texts cut into their tokens.

SmolLM2's comes with the embedded model. Qwen's is the vocabulary file that the package qwen-agent
carries (requirements-dev-nodeps.txt); the package is not imported, for it needs many others.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import regex
import xgrammar as xgr

from pask.config import load as load_config
from pask.evaluation.model import load_vocabulary
from pask.paths import CONFIGS


class RealTokenizer(NamedTuple):
    info: xgr.TokenizerInfo
    cut: Callable[[str], list[bytes]]  # the bytes of each of a text's tokens


def real_tokenizer(name: str) -> RealTokenizer:
    """By name, "smollm2" or "qwen"; skips the test where its file is not installed."""
    return {"smollm2": smollm2, "qwen": qwen}[name]()


@cache
def smollm2() -> RealTokenizer:
    loaded = load_vocabulary(load_config(CONFIGS / "smollm2-135m-sample.yaml"))
    texts, tokenizer = loaded.info.decoded_vocab, loaded.tokenizer

    def cut(text: str) -> list[bytes]:
        return [texts[i] for i in tokenizer(text, add_special_tokens=False)["input_ids"]]

    return RealTokenizer(loaded.info, cut)


# How Qwen2 and Qwen3 split a text before merging bytes, and what they add to the file's tokens.
_QWEN_WORDS = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_TAGS = {"<tool_call>": 151657, "</tool_call>": 151658}  # text, unlike its control tokens
_QWEN_STOPS = [151643, 151645]
_QWEN_SIZE = 151936


@cache
def qwen() -> RealTokenizer:
    ranks = {}
    for line in _qwen_file().read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    texts = [b""] * _QWEN_SIZE
    for token, rank in ranks.items():
        texts[rank] = token
    for tag, rank in _QWEN_TAGS.items():
        texts[rank] = tag.encode()
    info = xgr.TokenizerInfo(
        texts, xgr.VocabType.RAW, vocab_size=_QWEN_SIZE, stop_token_ids=_QWEN_STOPS
    )
    tags = regex.compile("(" + "|".join(_QWEN_TAGS) + ")")

    def cut(text: str) -> list[bytes]:
        tokens: list[bytes] = []
        for part in tags.split(text):
            if part in _QWEN_TAGS:
                tokens.append(part.encode())
            else:
                for word in _QWEN_WORDS.findall(part):
                    tokens += _merged(word.encode(), ranks)
        return tokens

    return RealTokenizer(info, cut)


def _qwen_file() -> Path:
    spec = importlib.util.find_spec("qwen_agent")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("qwen-agent is not installed (requirements-dev-nodeps.txt)")
    return Path(next(iter(spec.submodule_search_locations))) / "utils" / "qwen.tiktoken"


def _merged(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair encoding: the pair of the lowest rank is joined first."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        lowest = min(pairs)
        if lowest == len(ranks):
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
