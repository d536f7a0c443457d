"""What of a model is needed to make requests and read their tokens, and nothing that weighs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xgrammar as xgr
from transformers import PreTrainedTokenizerBase

from pask.bfcl.grammar import tokenizer_info
from pask.digests import sha256 as sha256_of
from pask.engine.layout import read_layout
from pask.engine.loading import check_fits, load_tokenizer, model_folder, stop_tokens


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokenizer, and its vocabulary as xgrammar sees it."""

    tokenizer: PreTrainedTokenizerBase
    info: xgr.TokenizerInfo
    layers: int
    tokenizer_sha256: str  # of tokenizer.json


def load_vocabulary(
    source: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    sha256: str | None = None,
) -> Vocabulary:
    """The vocabulary of the model that `source` names; arguments and errors as `load_model`'s, but
    a folder's `sha256` is not checked, since that would read its weights."""
    folder, _, _ = model_folder(source, revision, cache_dir, sha256)
    layout, tokenizer = read_layout(folder), load_tokenizer(folder)
    check_fits(tokenizer, layout, source)
    return Vocabulary(
        tokenizer,
        tokenizer_info(tokenizer, layout.vocab_size, stop_tokens(folder, tokenizer)),
        layout.layers,
        sha256_of((folder / "tokenizer.json").read_bytes()),
    )
