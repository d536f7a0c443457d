"""Load a model from a folder, a GGUF file, the hub, or the embedded default."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import huggingface_hub
import xgrammar as xgr
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pask.bfcl.grammar import tokenizer_info as vocabulary_of
from pask.engine.digests import folder_digest
from pask.engine.embedded import EMBEDDED, embedded_model
from pask.engine.embedded import SHA256 as EMBEDDED_SHA256
from pask.engine.gguf import converted_folder
from pask.engine.layout import ModelLayout, read_layout
from pask.engine.transformer import Transformer
from pask.engine.weights import read_weights
from pask.errors import PaskError
from pask.paths import cache_dir as default_cache_dir

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]


@dataclass(frozen=True)
class ModelFiles:
    """A model but for its weights; `digest` is the sha256 of its files, the weights among them."""

    folder: Path  # with the safetensors, config and tokenizer that were read
    name: str
    digest: str
    layout: ModelLayout
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]  # any of them ends an answer

    @cached_property
    def token_texts(self) -> list[bytes]:
        """The bytes that each token of the vocabulary stands for."""
        texts: list[bytes] = tokenizer_info(self).decoded_vocab
        return texts


@dataclass(frozen=True)
class LoadedModel(ModelFiles):
    """A model ready to use."""

    transformer: Transformer


def load_model(
    source: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    sha256: str | None = None,
) -> LoadedModel:
    """Load the model that `source` names.

    `source`: a folder as transformers saves it (safetensors), a `.gguf` file, a hub id
    (`owner/name`, at `revision`), or `embedded:smollm2-135m`. `cache_dir`: where the embedded and
    converted models are kept (hub models are kept in the hub's own cache). `sha256`: expected of
    the GGUF file, or of a folder's `digest`. PaskError, in one line, for all that can be wrong with
    these.
    """
    files = model_files(source, revision=revision, cache_dir=cache_dir, sha256=sha256)
    return LoadedModel(
        transformer=Transformer(files.layout, read_weights(files.folder, files.layout)),
        tokenizer=files.tokenizer,
        layout=files.layout,
        name=files.name,
        folder=files.folder,
        digest=files.digest,
        stop_token_ids=files.stop_token_ids,
    )


def model_files(
    source: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    sha256: str | None = None,
) -> ModelFiles:
    """A model's files and what they say, its weights unread; arguments and errors as above."""
    folder, name, digest = model_folder(source, revision, cache_dir, sha256)
    if digest is None:
        digest = folder_digest(folder)
        if sha256 not in (None, digest):
            raise PaskError(f"the digest is {digest}", where=source, why=f"asked for: {sha256}")
    layout = read_layout(folder)
    spoken = load_tokenizer(folder)
    check_fits(spoken, layout, source)
    return ModelFiles(folder, name, digest, layout, spoken, stop_tokens(folder, spoken))


def model_folder(
    source: str, revision: str | None, cache_dir: Path | None, sha256: str | None
) -> tuple[Path, str, str | None]:
    """The folder with the model's files, fetched or converted if need be; what the model is called;
    its digest where a GGUF file was converted (and checked), None where `source` is a folder."""
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    path, name = _locate(source, revision, cache)
    if path.suffix == ".gguf" and path.is_file():
        wanted = EMBEDDED_SHA256 if source == EMBEDDED else sha256
        folder, digest = converted_folder(path, cache, wanted)
        return folder, name, digest
    if path.is_dir():
        return path, name, None
    raise PaskError("neither a model folder nor a .gguf file", where=source)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`, from its tokenizer.json; runs no code of the folder's."""
    if not (folder / "tokenizer.json").is_file():
        raise PaskError(
            "no tokenizer.json",
            where=str(folder),
            todo="save the tokenizer in its fast form, or name a folder that has it",
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the parsers of a broken file raise, in one line
        raise PaskError(
            "the tokenizer does not load",
            where=str(folder),
            why=f"{type(error).__name__}: {error}",
        ) from error


def check_fits(tokenizer: PreTrainedTokenizerBase, layout: ModelLayout, source: str) -> None:
    """PaskError for a tokenizer of more tokens than the model has."""
    if len(tokenizer) > layout.vocab_size:
        raise PaskError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {layout.vocab_size}",
            where=source,
            todo="give the tokenizer that belongs to the model",
        )


def tokenizer_info(model: ModelFiles) -> xgr.TokenizerInfo:
    """The model's vocabulary as xgrammar sees it: what grammars must be compiled with."""
    return vocabulary_of(model.tokenizer, model.layout.vocab_size, model.stop_token_ids)


def _locate(source: str, revision: str | None, cache: Path) -> tuple[Path, str]:
    """Where the model that `source` names lies, fetched if need be, and what it is called."""
    if source == EMBEDDED:
        path = embedded_model(cache)
        return path, path.stem
    path = Path(source).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.exists():
        return path, path.stem
    if _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
        return _from_hub(source, revision), source
    raise PaskError(
        "no such model",
        where=source,
        todo=f"give a model folder, a .gguf file, a hub id or {EMBEDDED}",
    )


def _from_hub(source: str, revision: str | None) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=_HUB_FILES)
        )
    except Exception as error:  # offline, unknown or closed repository, no such revision
        raise PaskError(
            "the hub does not give this model",
            where=source if revision is None else f"{source}@{revision}",
            why=type(error).__name__,
            todo="give a local folder or .gguf file instead (model.path)",
        ) from error


def stop_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End tokens of the tokenizer and of the folder's configs (a chat's end and a text's end)."""
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        try:
            named = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            ends = named.get("eos_token_id")
            found.update(map(int, [ends] if isinstance(ends, int) else ends or []))
        except (ValueError, TypeError, AttributeError) as error:
            raise PaskError("cannot read eos_token_id", where=str(path), why=str(error)) from error
    if not found:
        raise PaskError(
            "no end-of-sequence token", where=str(folder), todo="set eos_token_id in config.json"
        )
    return tuple(sorted(found))
