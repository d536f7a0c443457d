"""BFCL function docs (their own type names) as JSON Schema, for the grammar and for the prompt.

Two views of one document. `arguments_schema` is what the grammar enforces: structure, types and
enumerations, in the order of the document. `openai_function` is what a prompt shows: the document
as it is, with the type names that chat templates and models know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pask.errors import PaskError

# BFCL's type names (Python's) -> JSON Schema's; None: any JSON value.
TYPES: dict[str, str | None] = {
    "string": "string",
    "integer": "integer",
    "float": "number",
    "number": "number",
    "boolean": "boolean",
    "array": "array",
    "tuple": "array",
    "dict": "object",
    "object": "object",
    "any": None,
}

JsonSchema = dict[str, Any]


def arguments_schema(function: Mapping[str, Any]) -> JsonSchema:
    """The JSON Schema of one function's arguments object, properties in the document's order.

    Raises PaskError, naming function and parameter, for a type name that BFCL's Python categories
    do not have and for a required parameter that is not among the properties.
    """
    where = f"function {function.get('name')!r}"
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties"), Mapping):
        raise PaskError("the function has no parameters object with properties", where=where)
    return _object(parameters["properties"], parameters.get("required"), where)


def call_schema(function: Mapping[str, Any]) -> JsonSchema:
    """The JSON Schema of one call, `{"name": ..., "arguments": {...}}`, of this function."""
    return {
        "type": "object",
        "properties": {
            "name": {"enum": [function["name"]]},
            "arguments": arguments_schema(function),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def function_names(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """The functions' names; PaskError where there is none, or one is there twice."""
    names = [function["name"] for function in functions]
    if not names:
        raise PaskError("a row without functions has no grammar")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PaskError(f"two functions share the name {repeated[0]!r}")
    return names


def any_call_schema(functions: Sequence[Mapping[str, Any]]) -> JsonSchema:
    """The JSON Schema of one call of any of the functions (at least one, no name twice)."""
    function_names(functions)
    return {"anyOf": [call_schema(function) for function in functions]}


def calls_schema(functions: Sequence[Mapping[str, Any]]) -> JsonSchema:
    """The JSON Schema of an answer as one list: one or more calls of any of the functions."""
    return {"type": "array", "items": any_call_schema(functions), "minItems": 1}


def openai_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """The document with JSON Schema's type names; everything else, dotted name included, kept.

    "any" becomes a parameter without `type`, as JSON Schema writes it.
    """
    where = f"function {function.get('name')!r}"
    return {
        key: _shown(value, where) if key == "parameters" else value
        for key, value in function.items()
    }


def _json_type(name: Any, where: str) -> str | None:
    if not isinstance(name, str) or name not in TYPES:
        raise PaskError(
            f"unknown type {name!r}", where=where, todo=f"known types: {', '.join(TYPES)}"
        )
    return TYPES[name]


def _object(properties: Mapping[str, Any], required: Any, where: str) -> JsonSchema:
    # A few nested documents carry `required: true` (a flag on the parameter itself): not a list of
    # keys, so it says nothing about this object's own keys.
    names = list(required) if isinstance(required, Sequence) else []
    for name in names:
        if name not in properties:
            # xgrammar would quietly build a grammar that no answer can satisfy.
            raise PaskError(f"required parameter {name!r} is not among the properties", where=where)
    return {
        "type": "object",
        "properties": {
            name: _value(document, f"{where}, parameter {name!r}")
            for name, document in properties.items()
        },
        "required": [name for name in properties if name in names],
        "additionalProperties": False,
    }


def _value(document: Mapping[str, Any], where: str) -> JsonSchema:
    """One parameter. An enumeration replaces the declared type, for BFCL declares lists of strings
    on booleans and integers, where type and enumeration together would admit nothing."""
    kind = _json_type(document.get("type"), where)
    values = document.get("enum")
    if values and not all(isinstance(value, (str, int)) for value in values):
        # xgrammar writes other literals (floats, lists, null) not as the answer's layout does.
        raise PaskError(f"enumeration {values!r} holds more than strings and integers", where=where)
    if values and kind != "array":
        return {"enum": list(values)}
    if kind is None:
        return {}
    if kind == "array":
        schema: JsonSchema = {"type": "array"}
        if values:  # meant for the items
            schema["items"] = {"enum": list(values)}
        elif "items" in document:
            schema["items"] = _value(document["items"], f"{where}, items")
        return schema
    if kind == "object":
        if document.get("properties"):
            return _object(document["properties"], document.get("required"), where)
        # No keys declared: free form, whatever `required` may list.
        return {"type": "object", "additionalProperties": True}
    return {"type": kind}


def _shown(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for key, value in document.items():
        if key == "type":
            kind = _json_type(value, where)
            if kind is not None:
                shown[key] = kind
        elif key == "properties":
            shown[key] = {
                name: _shown(child, f"{where}, parameter {name!r}") for name, child in value.items()
            }
        elif key == "items":
            shown[key] = _shown(value, f"{where}, items")
        else:
            shown[key] = value
    return shown
