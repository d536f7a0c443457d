"""Part files: what a kill leaves behind is found again, whole, and nothing else is."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.errors import PaskError
from pask.evaluation.parts import finished, open_part, read_part

records = st.lists(
    st.fixed_dictionaries({"id": st.uuids().map(str), "text": st.text()}), max_size=6
)


@given(written=records, cut=st.integers(0, 10_000))
def test_a_kill_at_any_byte_loses_only_the_item_in_hand(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, str]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("parts") / "1-of-1.jsonl"
    with open_part(path) as part:
        for record in written:
            part.append(record)
    data = path.read_bytes()
    cut = min(cut, len(data))
    path.write_bytes(data[:cut])
    survivors = written[: data[:cut].count(b"\n")]
    assert read_part(path) == survivors
    with open_part(path) as part:
        for record in written[len(survivors) :]:
            part.append(record)
    assert path.read_bytes() == data


def test_a_torn_last_line_is_dropped_even_if_it_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b"}')
    assert read_part(path) == [{"id": "a"}]


def test_damage_in_the_middle_is_an_error_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "a"}\n{"id": \n{"id": "c"}\n')
    with pytest.raises(PaskError, match=r"a\.jsonl: line 2 is damaged.*delete the file"):
        read_part(path)


def test_unicode_line_separators_do_not_split_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record = {"id": "a", "text": "one\u2028two\x85three\x1cfour\rfive"}
    with open_part(path) as part:
        part.append(record)
    assert read_part(path) == [record]
    assert path.read_bytes().count(b"\n") == 1


def test_finished_reads_every_shard_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "1-of-2.jsonl").write_text(json.dumps({"id": "a", "n": 1}) + "\n")
    (tmp_path / "2-of-2.jsonl").write_text(json.dumps({"id": "b", "n": 2}) + "\n")
    assert {key: value["n"] for key, value in finished(tmp_path).items()} == {"a": 1, "b": 2}
    assert finished(tmp_path / "nowhere") == {}


def test_two_writers_never_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open_part(path), pytest.raises(PaskError, match="another evaluation"), open_part(path):
        pass
