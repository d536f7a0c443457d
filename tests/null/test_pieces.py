"""Labelled tool documents: json.dumps's text, and a label for every part."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.bfcl.data import load_rows
from pask.bfcl.pieces import Piece, Prompt, document_pieces, joined, merged
from pask.bfcl.schema import openai_function
from pask.structure.labels import Label

FUNCTION = {
    "name": "pkg.book",
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {
            "description": {"type": "string", "description": 'Say "año".', "default": None},
            "name": {
                "type": "array",
                "items": {"type": "string", "description": "One name."},
                "description": "All names.",
            },
            "kind": {"enum": ["a", "b"], "description": "The name."},
            "free": {},
        },
        "required": ["name"],
    },
}


def labelled(pieces, label):
    return [piece.text for piece in pieces if piece.label == label]


@pytest.mark.parametrize("indent", [None, 2, 4])
def test_the_text_is_json_dumps(indent):
    tool = {"type": "function", "function": FUNCTION}
    for document, kind in ((FUNCTION, "function"), (tool, "tool")):
        text = json.dumps(document, ensure_ascii=False, indent=indent)
        assert joined(document_pieces(document, kind, indent)) == text


def test_labels_follow_the_place_in_the_document_not_the_word():
    pieces = document_pieces({"type": "function", "function": FUNCTION}, "tool")
    assert labelled(pieces, "function_name") == ["pkg.book"]
    assert labelled(pieces, "function_description") == []  # it is empty
    assert labelled(pieces, "parameter_key") == ["description", "name", "kind", "free"]
    assert labelled(pieces, "parameter_description") == [
        'Say \\"año\\".',
        "One name.",
        "All names.",
        "The name.",
    ]
    assert labelled(pieces, "type") == [
        '"type": "object"',
        '"type": "string"',
        '"type": "array"',
        '"type": "string"',
    ]
    assert labelled(pieces, "default") == ['"default": null']
    assert labelled(pieces, "enum") == ['"enum": ["a", "b"]']
    assert labelled(pieces, "required") == ['"required": ["name"]']
    assert labelled(pieces, "other_constraint") == []


def test_nested_parameters_are_labelled_as_the_outer_ones_are():
    inner = {
        "type": "object",
        "properties": {
            "type": {"type": "string", "format": "date", "description": "Kind."},
            "enum": {"type": "integer", "required": True, "maximum": 3},
        },
        "required": ["type"],
    }
    parameters = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": inner}},
        "required": [],
        "optional": ["list"],
    }
    pieces = document_pieces({"name": "f", "parameters": parameters}, "function")
    assert labelled(pieces, "parameter_key") == ["list", "type", "enum"]
    assert labelled(pieces, "parameter_description") == ["Kind."]
    assert labelled(pieces, "required") == [
        '"required": true',
        '"required": ["type"]',
        '"required": []',
    ]
    assert labelled(pieces, "other_constraint") == [
        '"format": "date"',
        '"maximum": 3',
        '"optional": ["list"]',
    ]
    assert len(labelled(pieces, "type")) == 5
    assert labelled(pieces, "enum") == []


def test_all_of_bfcl():
    for row in {row.cluster: row for row in load_rows().values()}.values():
        for function in map(openai_function, row.functions):
            pieces = document_pieces(function, "function")
            assert joined(pieces) == json.dumps(function, ensure_ascii=False)
            assert labelled(pieces, "function_name") == [function["name"]]
            properties = function["parameters"]["properties"]
            assert set(properties) <= set(labelled(pieces, "parameter_key"))


@given(st.lists(st.builds(Piece, st.text(max_size=3), st.sampled_from(Label))))
def test_merging_keeps_the_text_and_every_characters_label(pieces):
    def characters(some):
        return [(character, piece.label) for piece in some for character in piece.text]

    out = merged(pieces)
    assert characters(out) == characters(pieces)
    assert all(piece.text for piece in out)
    assert all(a.label != b.label for a, b in itertools.pairwise(out))


def test_a_prompt_is_its_pieces():
    with pytest.raises(ValueError, match="do not make up"):
        Prompt("ab", (Piece("a", Label.USER),))
    with pytest.raises(ValueError, match="unknown label"):
        Piece("a", "usr")  # nor would "user" do: a piece holds the Label itself
