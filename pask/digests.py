"""One spelling of a value, and the sha256 of it: what names every file, key and split."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical(value: Any) -> str:
    """JSON with one spelling for one value: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def sha256(data: str | bytes) -> str:
    """Hex sha256 of bytes, or of a text's UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def digest(value: Any) -> str:
    """Hex sha256 of a value's canonical JSON."""
    return sha256(canonical(value))
