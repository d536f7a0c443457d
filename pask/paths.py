"""Where the project's own files lie and where downloads are kept."""

from __future__ import annotations

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
CONFIGS = PROJECT / "configs"


def cache_dir() -> Path:
    """Downloads and converted weights: $PASK_CACHE, else `.cache` in the project."""
    return Path(os.environ.get("PASK_CACHE") or PROJECT / ".cache")
