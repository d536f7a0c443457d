"""Answers under Full KV as files: one header line, then one JSON line a request.

A trajectory is what a request's tokens were, whichever engine chose them. Whoever needs reference
answers reads such a file and not an engine, so that another engine's take the place of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from pask.digests import canonical
from pask.errors import PaskError
from pask.files import write_text
from pask.json_lines import LineWriter, line_of, open_lines

SCHEMA = "pask-trajectories-1"
_AGAIN = "delete the file: its answers are computed again"


@dataclass(frozen=True)
class Header:
    """What was asked: trajectories of equal headers, from whatever engine, can stand in for each
    other.

    `model`: sha256 of weights, config and tokenizer files; `vocab_size`: the model's number of
    logits; `prompt`: the prompt style; `grammar`: the grammar engine and its version; `data`: the
    digest of the data files.
    """

    model: str
    vocab_size: int
    prompt: str
    answer_form: str
    max_new_tokens: int
    grammar: str
    data: str


@dataclass(frozen=True)
class Maker:
    """Which engine answered, and what else can change its tokens.

    `dtype`: of weights and arithmetic; `kv_dtype`: of the stored keys and values; `versions`: of
    packages; `source`: digest of this project's own modules that took part.
    """

    engine: str
    engine_version: str
    dtype: str
    kv_dtype: str
    versions: Mapping[str, str]
    source: str


@dataclass(frozen=True)
class Trajectory:
    """One request's answer; `token_ids` without the stop token, which counts as a choice.

    So an answer that ended by itself has fewer than `max_new_tokens` tokens, and one that was cut
    off has exactly as many. `prompt_digest`: as `pask.bfcl.request.Request` has it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length"]
    prompt_tokens: int
    prompt_digest: str


class Asked(Protocol):
    """What of a request says whether a trajectory is its answer."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_digest(self) -> str: ...


@dataclass(frozen=True)
class Trajectories:
    """A file's content, in the file's order."""

    header: Header
    maker: Maker
    by_id: Mapping[str, Trajectory]
    path: Path

    def of(self, request: Asked) -> Trajectory:
        """The request's trajectory; PaskError where there is none or it answers another prompt."""
        found = self.by_id.get(request.id)
        if found is None:
            raise PaskError(
                f"no trajectory of {request.id}",
                where=str(self.path),
                todo="collect the trajectories of the part that has this row",
            )
        if found.prompt_digest != request.prompt_digest:
            raise PaskError(
                f"the trajectory of {request.id} answers another prompt",
                where=str(self.path),
                why=f"its digest is {found.prompt_digest[:16]}, ours {request.prompt_digest[:16]}",
                todo=_AGAIN,
            )
        return found


class TrajectoryWriter:
    """Appends to one locked file; `done` holds what was in it, and what was appended since."""

    def __init__(self, part: LineWriter, header: Header, done: dict[str, Trajectory]) -> None:
        self._part, self._header, self.done = part, header, done

    def append(self, trajectory: Trajectory) -> None:
        """Write one trajectory through to the disk; ValueError if it does not fit the header."""
        record = _record(trajectory)
        if trajectory.request_id in self.done:
            raise ValueError(f"{trajectory.request_id} is there already")
        _trajectory(record, self._header)
        self._part.append(record)
        self.done[trajectory.request_id] = trajectory


def read(path: Path, expected: Header) -> Trajectories:
    """Read a trajectory file, whichever engine made it.

    A last line without its newline was torn by a kill: its request is not finished and is left out.
    PaskError, in one line, for a file that is not there or holds other trajectories than `expected`
    says, a damaged line, and a request that is in it twice.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PaskError(
            "cannot read the trajectories",
            where=str(path),
            why=error.strerror or type(error).__name__,
            todo="collect them first",
        ) from error
    return _parsed(path, data, expected)


def write(path: Path, header: Header, maker: Maker, trajectories: Iterable[Trajectory]) -> None:
    """Write a whole file, or nothing at all; ValueError for trajectories that do not fit."""
    records = [_record(trajectory) for trajectory in trajectories]
    for record in records:
        _trajectory(record, header)
    if len({record["id"] for record in records}) < len(records):
        raise ValueError("a request has two trajectories")
    write_text(path, "".join(map(line_of, [_head(header, maker), *records])))


@contextmanager
def open_writer(path: Path, header: Header, maker: Maker) -> Iterator[TrajectoryWriter]:
    """Open a file for appending, after the whole lines that it has, and hold its lock.

    PaskError as `read` gives it, also where another maker's are in it (two makers never mix), and
    where another process holds the file.
    """
    with open_lines(path) as part:
        data = path.read_bytes()
        if not data:
            part.append(_head(header, maker))
            yield TrajectoryWriter(part, header, {})
            return
        there = _parsed(path, data, header)
        _check_same(path, asdict(there.maker), asdict(maker))
        yield TrajectoryWriter(part, header, dict(there.by_id))


def _head(header: Header, maker: Maker) -> dict[str, Any]:
    return {"schema": SCHEMA, "asked": asdict(header), "made_by": asdict(maker)}


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "id": trajectory.request_id,
        "prompt_tokens": trajectory.prompt_tokens,
        "prompt_digest": trajectory.prompt_digest,
        "token_ids": list(trajectory.token_ids),
        "finish": trajectory.finish,
    }


def _parsed(path: Path, data: bytes, expected: Header) -> Trajectories:
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    if not lines:
        raise PaskError("it has no whole line", where=str(path), todo=_AGAIN)
    header, maker = _read_head(path, lines[0])
    _check_same(path, asdict(header), asdict(expected))
    by_id: dict[str, Trajectory] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            trajectory = _trajectory(_object(line), header)
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(path, number, error) from error
        if trajectory.request_id in by_id:
            raise PaskError(
                f"{trajectory.request_id} is in it twice",
                where=f"{path}, line {number}",
                todo=_AGAIN,
            )
        by_id[trajectory.request_id] = trajectory
    return Trajectories(header, maker, by_id, path)


def _read_head(path: Path, line: bytes) -> tuple[Header, Maker]:
    try:
        head = _object(line)
        if head.get("schema") != SCHEMA:
            raise PaskError(f"not a trajectory file of schema {SCHEMA}", where=str(path))
        return _header(head["asked"]), _maker(head["made_by"])
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(path, 1, error) from error


def _damaged(path: Path, number: int, error: Exception) -> PaskError:
    return PaskError(
        f"line {number} is damaged",
        where=str(path),
        why=f"{type(error).__name__}: {error}",
        todo=_AGAIN,
    )


def _check_same(path: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """PaskError naming the first field in which a file's head differs from what is wanted."""
    for name, value in wanted.items():
        if there[name] != value:
            raise PaskError(
                f"its {name} is {_short(there[name])}",
                where=str(path),
                why=f"wanted: {_short(value)}",
                todo="collect the trajectories with this config, or give the file that fits it",
            )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else canonical(value)
    return text[:16] if len(text) == 64 else text  # a digest's beginning says enough


def _object(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise TypeError("it is no object")
    return value


def _header(values: Mapping[str, Any]) -> Header:
    header = Header(**{f.name: values[f.name] for f in fields(Header)})
    _check_texts(header, ("model", "prompt", "answer_form", "grammar", "data"))
    _check_counts(header, ("vocab_size", "max_new_tokens"))
    return header


def _maker(values: Mapping[str, Any]) -> Maker:
    maker = Maker(**{f.name: values[f.name] for f in fields(Maker)})
    _check_texts(maker, ("engine", "engine_version", "dtype", "kv_dtype", "source"))
    if not isinstance(maker.versions, dict):
        raise TypeError(f"versions is {maker.versions!r}")
    return maker


def _trajectory(record: Mapping[str, Any], header: Header) -> Trajectory:
    """A line's trajectory; KeyError, TypeError or ValueError where it cannot be one."""
    ids, finish = record["token_ids"], record["finish"]
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise TypeError("token_ids is no list of integers")
    if ids and not 0 <= min(ids) <= max(ids) < header.vocab_size:
        raise ValueError(f"a token is outside the vocabulary of {header.vocab_size}")
    whole = {"stop": len(ids) < header.max_new_tokens, "length": len(ids) == header.max_new_tokens}
    if not whole.get(finish, False):
        raise ValueError(f"{len(ids)} tokens cannot end with finish {finish!r}")
    found = Trajectory(
        record["id"], tuple(ids), finish, record["prompt_tokens"], record["prompt_digest"]
    )
    _check_texts(found, ("request_id", "prompt_digest"))
    _check_counts(found, ("prompt_tokens",))
    return found


def _check_texts(value: object, names: Iterable[str]) -> None:
    for name in names:
        if not isinstance(getattr(value, name), str):
            raise TypeError(f"{name} is {getattr(value, name)!r}")


def _check_counts(value: object, names: Iterable[str]) -> None:
    for name in names:
        count = getattr(value, name)
        if type(count) is not int or count < 1:
            raise TypeError(f"{name} is {count!r}")
