"""Function documents for the tests of tags."""

from __future__ import annotations

from typing import Any


def document(name: str, required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "dict", "properties": properties, "required": required}
    return {"name": name, "description": "", "parameters": parameters}
