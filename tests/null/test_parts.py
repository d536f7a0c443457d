"""Part files: what a kill leaves behind is found again, whole, and nothing else is."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.errors import PaskError
from pask.evaluation.parts import finished, read_part
from pask.evaluation.record import FIELDS
from pask.json_lines import open_lines

Record = dict[str, Any]


def record(row_id: str, text: str = "", number: int = 0) -> Record:
    """A whole record: every field that a part file must hold, with a value of its type."""
    empty: Record = {name: kind() for name, kind in FIELDS.items()}
    return empty | {"id": row_id, "text": text, "new_tokens": number}


records = st.lists(st.builds(record, st.uuids().map(str), st.text()), max_size=6)


def lines(*several: Record) -> str:
    return "".join(json.dumps(one) + "\n" for one in several)


@given(written=records, cut=st.integers(0, 10_000))
def test_a_kill_at_any_byte_loses_only_the_item_in_hand(
    tmp_path_factory: pytest.TempPathFactory, written: list[Record], cut: int
) -> None:
    path = tmp_path_factory.mktemp("parts") / "1-of-1.jsonl"
    with open_lines(path) as part:
        for one in written:
            part.append(one)
    data = path.read_bytes()
    cut = min(cut, len(data))
    path.write_bytes(data[:cut])
    survivors = written[: data[:cut].count(b"\n")]
    assert read_part(path) == survivors
    with open_lines(path) as part:
        for one in written[len(survivors) :]:
            part.append(one)
    assert path.read_bytes() == data


def test_a_torn_last_line_is_dropped_even_if_it_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(record("a")) + lines(record("b")).rstrip("\n"))
    assert read_part(path) == [record("a")]


@pytest.mark.parametrize(
    "damaged",
    ['{"id": ', "[]", '{"id": "b"}', json.dumps(record("b") | {"finish": 1})],
    ids=["torn", "no object", "fields missing", "a wrong type"],
)
def test_damage_in_the_middle_is_an_error_that_says_where(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(record("a")) + damaged + "\n" + lines(record("c")))
    with pytest.raises(PaskError, match=r"a\.jsonl: line 2 is damaged.*delete the file"):
        read_part(path)


def test_unicode_line_separators_do_not_split_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    one = record("a", "one\u2028two\x85three\x1cfour\rfive")
    with open_lines(path) as part:
        part.append(one)
    assert read_part(path) == [one]
    assert path.read_bytes().count(b"\n") == 1


def test_finished_reads_every_shard_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "1-of-2.jsonl").write_text(lines(record("a", number=1)))
    (tmp_path / "2-of-2.jsonl").write_text(lines(record("b", number=2)))
    found = {key: value["new_tokens"] for key, value in finished(tmp_path).items()}
    assert found == {"a": 1, "b": 2}
    assert finished(tmp_path / "nowhere") == {}


def test_two_writers_never_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open_lines(path), pytest.raises(PaskError, match="another evaluation"), open_lines(path):
        pass
