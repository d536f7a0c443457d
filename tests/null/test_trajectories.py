"""Trajectory files: what fits is read back whole, and what does not is refused in one line."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pask.engine.trajectories import Header, Maker, Trajectory, open_writer, read, write
from pask.errors import PaskError

HEADER = Header("a" * 64, 50, "one_example", "json_list", 4, "xgrammar 0.2.8", "d" * 64)
OURS = Maker("pask", "0.1.0", "float32", "float16", {"torch": "2.13.0"}, "0" * 16)
THEIRS = Maker("vllm", "0.32.0", "float32", "float32", {"torch": "2.13.0"}, "1" * 16)


def trajectory(request_id: str, *tokens: int, prompt_digest: str = "p") -> Trajectory:
    """Cut off where it has as many tokens as the header allows, ended by itself where fewer."""
    finish = "length" if len(tokens) == HEADER.max_new_tokens else "stop"
    return Trajectory(request_id, tokens, finish, 7, prompt_digest)


answers = st.lists(
    st.builds(
        lambda name, tokens: trajectory(name, *tokens),
        st.text(),
        st.lists(st.integers(0, HEADER.vocab_size - 1), max_size=HEADER.max_new_tokens),
    ),
    max_size=6,
    unique_by=lambda t: t.request_id,
)


@dataclass(frozen=True)
class Asked:
    id: str
    prompt_digest: str


@given(written=answers)
def test_a_file_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory]
) -> None:
    path = tmp_path_factory.mktemp("t") / "cal.jsonl"
    write(path, HEADER, THEIRS, written)
    found = read(path, HEADER)
    assert list(found.by_id.values()) == written
    assert list(found.by_id) == [one.request_id for one in written]
    assert (found.header, found.maker) == (HEADER, THEIRS)
    assert path.read_bytes().count(b"\n") == 1 + len(written)


@given(written=answers, cut=st.integers(0, 10_000))
def test_a_kill_at_any_byte_loses_only_the_answer_in_hand(
    tmp_path_factory: pytest.TempPathFactory, written: list[Trajectory], cut: int
) -> None:
    path = tmp_path_factory.mktemp("t") / "parts" / "cal.jsonl"
    with open_writer(path, HEADER, OURS) as writer:
        for one in written:
            writer.append(one)
    data = path.read_bytes()
    cut = min(cut, len(data))
    path.write_bytes(data[:cut])
    whole = data[:cut].count(b"\n")  # lines, the head among them
    survivors = written[: max(whole - 1, 0)]
    if whole:
        assert list(read(path, HEADER).by_id.values()) == survivors
    else:
        with pytest.raises(PaskError, match="no whole line"):
            read(path, HEADER)
    with open_writer(path, HEADER, OURS) as writer:
        assert list(writer.done.values()) == survivors
        for one in written[len(survivors) :]:
            writer.append(one)
    assert path.read_bytes() == data


def test_a_torn_last_line_is_left_out_even_if_it_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "cal.jsonl"
    write(path, HEADER, OURS, [trajectory("a", 1), trajectory("b", 2)])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert list(read(path, HEADER).by_id) == ["a"]


def line(**changed: Any) -> str:
    whole = {"id": "b", "prompt_tokens": 7, "prompt_digest": "p", "token_ids": [1, 2]}
    return json.dumps(whole | {"finish": "stop"} | changed)


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        ('{"id": ', "JSONDecodeError"),
        ("[]", "no object"),
        ('{"id": "b"}', "KeyError"),
        ("", "JSONDecodeError"),
        (line(id=3), "request_id is 3"),
        (line(prompt_digest=None), "prompt_digest is None"),
        (line(prompt_tokens=0), "prompt_tokens is 0"),
        (line(token_ids="12"), "no list of integers"),
        (line(token_ids=[1, True]), "no list of integers"),
        (line(token_ids=[1, 2.0]), "no list of integers"),
        (line(token_ids=[1, 50]), "outside the vocabulary of 50"),
        (line(token_ids=[-1]), "outside the vocabulary of 50"),
        (line(finish="length"), "2 tokens cannot end with finish 'length'"),
        (line(token_ids=[1, 2, 3, 4]), "4 tokens cannot end with finish 'stop'"),
        (line(token_ids=[1] * 5, finish="length"), "5 tokens cannot end"),
        (line(finish="abort"), "finish 'abort'"),
        (line(finish=[]), "TypeError"),
    ],
)
def test_damage_in_the_middle_says_where_and_why(tmp_path: Path, damaged: str, why: str) -> None:
    path = tmp_path / "cal.jsonl"
    write(path, HEADER, OURS, [trajectory("a", 1)])
    with path.open("a") as out:
        out.write(damaged + "\n" + line(id="c") + "\n")
    with pytest.raises(PaskError, match=r"cal\.jsonl: line 3 is damaged.*delete the file") as told:
        read(path, HEADER)
    assert why in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "b" * 64},
        {"vocab_size": 51},
        {"prompt": "format_last"},
        {"answer_form": "tool_call"},
        {"max_new_tokens": 5},
        {"grammar": "xgrammar 0.2.9"},
        {"data": "e" * 64},
    ],
)
def test_what_was_asked_differently_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "cal.jsonl"
    write(path, HEADER, OURS, [trajectory("a", 1)])
    (name,) = change
    with pytest.raises(PaskError, match=rf"cal\.jsonl: its {name} is "):
        read(path, replace(HEADER, **change))
    with (
        pytest.raises(PaskError, match=rf"its {name} is "),
        open_writer(path, replace(HEADER, **change), OURS),
    ):
        pass


def test_either_engine_is_read_but_two_makers_never_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cal.jsonl"
    write(path, HEADER, THEIRS, [trajectory("a", 1)])
    assert read(path, HEADER).maker.engine == "vllm"
    with pytest.raises(PaskError, match=r"its engine is vllm.*wanted: pask"):  # noqa: SIM117
        with open_writer(path, HEADER, OURS):
            pass
    newer = replace(THEIRS, versions={"torch": "2.14.0"})
    with pytest.raises(PaskError, match="its versions is"):  # noqa: SIM117
        with open_writer(path, HEADER, newer):
            pass
    assert read(path, HEADER).by_id == {"a": trajectory("a", 1)}


def test_a_request_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cal.jsonl"
    write(path, HEADER, OURS, [trajectory("a", 1)])
    path.write_text(path.read_text() + line(id="b") + "\n" + line(id="b", token_ids=[]) + "\n")
    with pytest.raises(PaskError, match=r"cal\.jsonl, line 4: b is in it twice"):
        read(path, HEADER)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cal.jsonl"
    for text, told in (
        ('{"id": "a"}\n', "not a trajectory file of schema pask-trajectories-1"),
        ("no json\n", "line 1 is damaged"),
        ("\xff\n", "line 1 is damaged"),
        ('{"schema": "pask-trajectories-1"}\n', "line 1 is damaged"),
        ("", "no whole line"),
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(PaskError, match=told):
            read(path, HEADER)
    with pytest.raises(PaskError, match=r"No such file.*collect them first"):
        read(tmp_path / "nowhere.jsonl", HEADER)


def test_a_trajectory_answers_its_own_prompt_only(tmp_path: Path) -> None:
    path = tmp_path / "cal.jsonl"
    write(path, HEADER, OURS, [trajectory("a", 1, prompt_digest="1" * 64)])
    found = read(path, HEADER)
    assert found.of(Asked("a", "1" * 64)).token_ids == (1,)
    with pytest.raises(PaskError, match=r"a answers another prompt; its digest is 1{16}, ours 2"):
        found.of(Asked("a", "2" * 64))
    with pytest.raises(PaskError, match="no trajectory of b"):
        found.of(Asked("b", "1" * 64))


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "cal.jsonl"
    cut = Trajectory("a", (1, 2), "length", 7, "p")
    with pytest.raises(ValueError, match="cannot end with"):
        write(path, HEADER, OURS, [cut])
    with pytest.raises(ValueError, match="two trajectories"):
        write(path, HEADER, OURS, [trajectory("a"), trajectory("a")])
    assert not path.exists()
    with open_writer(path, HEADER, OURS) as writer:
        writer.append(trajectory("a"))
        for wrong, told in ((cut, "already"), (replace(cut, request_id="b"), "cannot end")):
            with pytest.raises(ValueError, match=told):
                writer.append(wrong)
    assert list(read(path, HEADER).by_id) == ["a"]
