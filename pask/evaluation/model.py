"""Prepares a run's model once, so that its shards only load it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pask.config import RunConfig
from pask.engine import vocabulary
from pask.engine.loading import LoadedModel, ModelFiles, load_model, model_files
from pask.engine.vocabulary import Vocabulary
from pask.evaluation.keys import RESULTS
from pask.files import write_json
from pask.paths import cache_dir


def load(config: RunConfig) -> LoadedModel:
    """The run's model, from its local path where one is given."""
    model = config.model
    return load_model(
        model.path or model.source,
        revision=model.revision,
        sha256=model.sha256,
        cache_dir=cache_dir(),
    )


def load_files(config: RunConfig) -> ModelFiles:
    """The run's model without its weights."""
    model = config.model
    return model_files(
        model.path or model.source,
        revision=model.revision,
        sha256=model.sha256,
        cache_dir=cache_dir(),
    )


def load_vocabulary(config: RunConfig) -> Vocabulary:
    """The vocabulary of the run's model, without its weights."""
    model = config.model
    return vocabulary.load_vocabulary(
        model.path or model.source,
        revision=model.revision,
        sha256=model.sha256,
        cache_dir=cache_dir(),
    )


def prepare(config: RunConfig) -> Path:
    """Download, check and convert what is needed, and write results/<run>/model.json."""
    model = load(config)
    path = RESULTS / config.run / "model.json"
    write_json(
        path,
        {
            "name": config.model.name,
            "source": config.model.source,
            "digest": model.digest,
            "layout": dataclasses.asdict(model.layout),
        },
    )
    return path
