"""Load a model from a folder, a GGUF file, the hub, or the embedded default."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xgrammar as xgr
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pask.engine.embedded import EMBEDDED, embedded_model
from pask.engine.gguf import convert
from pask.engine.layout import ModelLayout, read_layout
from pask.engine.transformer import Transformer
from pask.engine.weights import read_weights, weight_files
from pask.errors import PaskError
from pask.paths import cache_dir as default_cache_dir

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "vocab*"]
# Everything beside the weights that a result can depend on.
_TEXT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use; `digest` is the sha256 of its weights, config and tokenizer files."""

    transformer: Transformer
    tokenizer: PreTrainedTokenizerBase
    layout: ModelLayout
    name: str
    digest: str
    stop_token_ids: tuple[int, ...]


def load_model(
    source: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    cache_dir: Path | None = None,
    sha256: str | None = None,
) -> LoadedModel:
    """Load the model that `source` names.

    `source`: a folder as transformers saves it (safetensors), a `.gguf` file, a hub id
    (`owner/name`, at `revision`), or `embedded:smollm2-135m`. `tokenizer`: a folder to take the
    tokenizer from instead. `cache_dir`: where converted and downloaded models are kept. `sha256`:
    expected of the GGUF file, or of a folder's `digest`. PaskError, in one line, for all that can
    be wrong with these.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    if source == EMBEDDED:
        path = embedded_model(cache)
    elif Path(source).expanduser().exists():
        path = Path(source).expanduser()
    elif _HUB_ID.fullmatch(source) and not source.endswith(".gguf"):
        path = _from_hub(source, revision)
    else:
        raise PaskError(
            "no such model",
            where=source,
            todo=f"give a model folder, a .gguf file, a hub id or {EMBEDDED}",
        )
    name = source if _HUB_ID.fullmatch(source) and not Path(source).exists() else path.stem
    if path.is_dir():
        folder, digest = path, folder_digest(path)
        name = path.name if name != source else source
        if sha256 is not None and sha256 != digest:
            raise PaskError(f"the digest is {digest}", where=source, why=f"{sha256} was asked for")
    elif path.suffix == ".gguf":
        folder = convert(path, cache, sha256=sha256)
        digest = (folder / "digest").read_text(encoding="ascii")
    else:
        raise PaskError("neither a folder nor a .gguf file", where=source)
    layout = read_layout(folder)
    spoken = load_tokenizer(folder if tokenizer is None else Path(tokenizer).expanduser())
    return LoadedModel(
        transformer=Transformer(layout, read_weights(folder, layout)),
        tokenizer=spoken,
        layout=layout,
        name=name,
        digest=digest,
        stop_token_ids=_stop_token_ids(folder, spoken, layout),
    )
