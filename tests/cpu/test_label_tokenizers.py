"""One label for every token, in every kind of tokenizer, and a refusal of those that lose text."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pask.bfcl.data import load_rows
from pask.bfcl.request import RequestBuilder
from pask.errors import PaskError
from pask.structure.labels import Label
from pask.structure.token_text import TokenText
from tests.cpu.label_tokenizers import KINDS, info_of, tokenizer_of

ORDER = list(Label)


@cache
def token_text_of(kind: str) -> TokenText:
    tokenizer = tokenizer_of(kind)
    return TokenText(info_of(tokenizer).decoded_vocab, tokenizer.added_tokens_decoder)


PARTS = st.one_of(
    st.sampled_from(
        ['{"name": "', "get_weather", '": ', " in Zürich", "Zu\u0308rich", "<|im_end|>", "\n  "]
    ),
    st.text('aegtw_ \n"{},:.ñ東京😀▁', max_size=5),
)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word piece"])
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Label), PARTS), min_size=1))
def test_any_pieces_in_any_tokenizer_that_keeps_the_text(kind, pieces):
    """Against the tokenizer's own offsets, where those are exact: a second, independent way."""
    text = "".join(part for _, part in pieces)
    encoded = tokenizer_of(kind)(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    labels = token_text_of(kind).labels(pieces, ids)
    assert len(labels) == len(ids)
    by_character = [label for label, part in pieces for _ in part]
    for label, (start, end) in zip(labels, encoded["offset_mapping"], strict=True):
        held = by_character[start:end]
        if "trimmed" not in kind:
            assert label is min(held or by_character[start:][:1], key=ORDER.index)
        elif held:  # the blanks around a word may be another's; a token of blanks has no offsets
            assert ORDER.index(label) <= min(map(ORDER.index, held))


def test_a_tokenizer_that_loses_text_is_refused_with_the_rows_name():
    tokenizer = tokenizer_of("word piece")
    builder = RequestBuilder(tokenizer, info_of(tokenizer), "one_example", "json_list")
    with pytest.raises(PaskError, match=r"^row simple_python_0: the tokens do not spell") as error:
        builder.prompt(load_rows()["simple_python_0"])
    assert "\n" not in str(error.value)
