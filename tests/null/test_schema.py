"""BFCL's documents as JSON Schema: each rule on a document of its own, then all of BFCL's."""

from __future__ import annotations

import jsonschema
import pytest

from pask.bfcl.data import load_rows
from pask.bfcl.schema import (
    any_call_schema,
    arguments_schema,
    call_schema,
    calls_schema,
    openai_function,
)
from pask.errors import PaskError


def function(name: str = "f", required: tuple[str, ...] = (), **properties: dict) -> dict:
    return {
        "name": name,
        "description": "does f",
        "parameters": {"type": "dict", "properties": properties, "required": list(required)},
    }


NUMBERS = {"type": "array", "items": {"type": "number"}}


@pytest.mark.parametrize(
    ("document", "schema"),
    [
        ({"type": "string", "description": "x", "default": "y"}, {"type": "string"}),
        ({"type": "integer", "maximum": 4}, {"type": "integer"}),
        ({"type": "float", "optional": True}, {"type": "number"}),
        ({"type": "boolean"}, {"type": "boolean"}),
        ({"type": "any"}, {}),
        ({"type": "tuple", "items": {"type": "float"}}, NUMBERS),
        ({"type": "array", "items": {"type": "float"}}, NUMBERS),
        ({"type": "array"}, {"type": "array"}),
        ({"type": "string", "enum": ["a", "b"]}, {"enum": ["a", "b"]}),
        ({"type": "boolean", "enum": ["True", "dontcare"]}, {"enum": ["True", "dontcare"]}),
        ({"type": "string", "enum": []}, {"type": "string"}),
        (
            {"type": "array", "items": {"type": "string"}, "enum": ["a"]},
            {"type": "array", "items": {"enum": ["a"]}},
        ),
        ({"type": "dict"}, {"type": "object", "additionalProperties": True}),
        ({"type": "dict", "properties": {}}, {"type": "object", "additionalProperties": True}),
        (
            {"type": "dict", "required": ["undeclared"]},
            {"type": "object", "additionalProperties": True},
        ),
        (
            {"type": "dict", "properties": {"k": {"type": "any"}}, "required": True},
            {
                "type": "object",
                "properties": {"k": {}},
                "required": [],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_one_parameter(document, schema):
    assert arguments_schema(function(p=document))["properties"] == {"p": schema}


def test_required_and_order_come_from_the_document():
    schema = arguments_schema(
        function(required=("a", "z"), z={"type": "any"}, m={"type": "any"}, a={"type": "any"})
    )
    assert list(schema["properties"]) == ["z", "m", "a"]
    assert schema["required"] == ["z", "a"]
    assert schema["additionalProperties"] is False


def test_calls_schema_admits_one_or_more_calls_of_any_function():
    functions = [function("f", x={"type": "integer"}), function("pkg.g")]
    validator = jsonschema.Draft202012Validator(calls_schema(functions))
    assert validator.is_valid([{"name": "f", "arguments": {"x": 1}}])
    assert validator.is_valid([{"name": "pkg.g", "arguments": {}}, {"name": "f", "arguments": {}}])
    assert not validator.is_valid([])
    assert not validator.is_valid([{"name": "h", "arguments": {}}])
    assert not validator.is_valid([{"name": "pkg.g", "arguments": {"x": 1}}])
    assert not validator.is_valid([{"name": "f", "arguments": {"x": "1"}}])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (function(p={"type": "HashMap"}), ["'HashMap'", "function 'f'", "parameter 'p'"]),
        (function(p={}), ["None", "parameter 'p'"]),
        (
            function(p={"type": "array", "items": {"type": "long"}}),
            ["'long'", "parameter 'p'", "items"],
        ),
        (
            function(p={"type": "dict", "properties": {"q": {"type": "char"}}}),
            ["parameter 'p', parameter 'q'"],
        ),
        (function(required=("absent",), p={"type": "any"}), ["'absent'", "function 'f'"]),
        (function(p={"type": "float", "enum": [0.5]}), ["[0.5]", "parameter 'p'"]),
        ({"name": "f", "parameters": {"type": "dict"}}, ["function 'f'", "no parameters"]),
    ],
)
def test_what_cannot_be_converted_is_named(broken, words):
    with pytest.raises(PaskError) as error:
        call_schema(broken)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_no_functions_and_repeated_names_are_refused():
    with pytest.raises(PaskError, match="without functions"):
        any_call_schema([])
    with pytest.raises(PaskError, match="share the name 'f'"):
        any_call_schema([function("f"), function("g"), function("f")])


def test_openai_function_changes_type_names_alone():
    document = function(
        "a.b",
        p={"type": "dict", "properties": {"type": {"type": "float", "default": 1.5}}},
        q={"type": "tuple", "items": {"type": "any", "description": "d"}, "enum": ["x"]},
    )
    shown = openai_function(document)
    assert shown["name"] == "a.b"
    assert shown["description"] == "does f"
    assert shown["parameters"]["type"] == "object"
    assert shown["parameters"]["properties"] == {
        "p": {"type": "object", "properties": {"type": {"type": "number", "default": 1.5}}},
        "q": {"type": "array", "items": {"description": "d"}, "enum": ["x"]},
    }
    assert document["parameters"]["type"] == "dict"


def test_all_of_bfcl_converts_to_valid_json_schema():
    schemas = [calls_schema(row.functions) for row in load_rows().values()]
    assert len(schemas) == 2351
    for schema in schemas[::50]:
        jsonschema.Draft202012Validator.check_schema(schema)
