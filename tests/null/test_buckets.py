"""Buckets: coarsened tags, their order, and groups of layers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.errors import PaskError
from pask.structure.buckets import (
    COARSENINGS,
    DEFAULT_COARSENING,
    LayerBucket,
    all_buckets,
    bucket_name,
    layer_groups,
)
from pask.structure.tags import CONSEQUENCE, Choice, Next, Phase, Role, Tag, TokenClass

TAGS = [
    Tag(token_class, role, phase, choice, next_)
    for (token_class, role), phase, choice, next_ in itertools.product(
        CONSEQUENCE, Phase, Choice, Next
    )
]
VALUE = Tag(TokenClass.STRING, Role.REQUIRED_VALUE, Phase.OPENING, Choice.SHARED, Next.CRITICAL)


def test_each_coarsening_leaves_of_a_tag_what_its_name_says() -> None:
    names = {coarsening: bucket_name(VALUE, coarsening) for coarsening in COARSENINGS}
    assert names == {
        "exact": "string/required_value/opening/shared/critical",
        "role_choice_next": "required_value/forced/critical",
        "role_choice": "required_value/forced",
        "role": "required_value",
    }
    assert bucket_name(VALUE) == names[DEFAULT_COARSENING]


@pytest.mark.parametrize(
    ("next_", "expected"),
    [(Next.CRITICAL, "critical"), (Next.NEAR, "not_critical"), (Next.END, "not_critical")],
)
def test_only_a_critical_next_byte_counts_as_critical(next_: Next, expected: str) -> None:
    assert bucket_name(VALUE._replace(next=next_)) == f"required_value/forced/{expected}"


@pytest.mark.parametrize(
    ("token_class", "expected"),
    [
        (TokenClass.STRING, "nested_value"),
        (TokenClass.NUMBER, "nested_value"),
        (TokenClass.BOOLEAN, "nested_value"),
        (TokenClass.NULL, "nested_value"),
        (TokenClass.KEY, "nested_structure"),
        (TokenClass.BOUNDARY, "nested_structure"),
    ],
)
def test_nested_tokens_are_values_or_structure(token_class: TokenClass, expected: str) -> None:
    tag = VALUE._replace(token_class=token_class, role=Role.NESTED)
    assert bucket_name(tag, "role") == expected


@pytest.mark.parametrize(
    ("coarsening", "size"),
    [("exact", len(TAGS)), ("role_choice_next", 44), ("role_choice", 22), ("role", 11)],
)
def test_every_tag_falls_into_a_listed_bucket_and_none_is_listed_in_vain(
    coarsening: str, size: int
) -> None:
    listed = all_buckets(coarsening)
    assert len(listed) == len(set(listed)) == size
    assert {bucket_name(tag, coarsening) for tag in TAGS} == set(listed)


def test_buckets_are_listed_by_consequence_then_choice_then_nearness() -> None:
    assert all_buckets("role") == (
        "function_selector",
        "enum",
        "required_value",
        "optional_value",
        "nested_value",
        "required_key",
        "optional_key",
        "nested_structure",
        "call_boundary",
        "argument_boundary",
        "layout",
    )
    assert all_buckets()[4:8] == (
        "enum/free/critical",
        "enum/free/not_critical",
        "enum/forced/critical",
        "enum/forced/not_critical",
    )
    assert all_buckets("exact")[0] == "function_name/function_selector/opening/free/critical"


def test_an_unknown_coarsening_names_the_nearest_one() -> None:
    expected = "unknown coarsening 'role_choise'; did you mean 'role_choice'"
    with pytest.raises(PaskError, match=expected):
        all_buckets("role_choise")
    with pytest.raises(PaskError, match=expected):
        bucket_name(VALUE, "role_choise")


def test_a_bucket_with_its_layer_group_is_a_key() -> None:
    actions = {LayerBucket("required_value", 0): "H", LayerBucket("required_value", 1): "L"}
    assert actions[LayerBucket(bucket_name(VALUE, "role"), 1)] == "L"


def test_where_layers_do_not_come_out_even_the_first_groups_have_one_more() -> None:
    assert layer_groups(30, 3) == (range(0, 10), range(10, 20), range(20, 30))
    assert layer_groups(8, 3) == (range(0, 3), range(3, 6), range(6, 8))
    assert layer_groups(1, 1) == (range(0, 1),)


def test_first_layers_set_the_groups_themselves() -> None:
    assert layer_groups(8, (0, 1, 5)) == (range(0, 1), range(1, 5), range(5, 8))


@given(st.integers(1, 200), st.data())
def test_groups_cover_every_layer_once_in_order_and_differ_by_at_most_one(
    layers: int, data: st.DataObject
) -> None:
    groups = layer_groups(layers, data.draw(st.integers(1, layers)))
    assert [layer for group in groups for layer in group] == list(range(layers))
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (5, "5 groups of 4 layers; ask for 1 to 4"),
        (0, "0 groups of 4 layers"),
        ((), "do not begin with 0 and rise"),
        ((1, 2), r"the first layers \[1, 2\] do not begin with 0 and rise"),
        ((0, 2, 2), "do not begin with 0 and rise"),
        ((0, 4), "layer 4 begins a group, the model's last layer is 3"),
    ],
)
def test_groups_that_the_model_cannot_have_are_refused(groups: object, expected: str) -> None:
    with pytest.raises(PaskError, match=f"structure.layer_groups: .*{expected}"):
        layer_groups(4, groups)  # type: ignore[arg-type]


def test_a_model_without_layers_is_a_mistake_of_the_program() -> None:
    with pytest.raises(ValueError, match="0 layers"):
        layer_groups(0, 1)
