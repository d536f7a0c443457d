"""Collects a part's answers under Full KV, from our engine or from vLLM, into one file.

The file says what was asked and who answered (`pask.engine.trajectories`), so its readers need not
know which engine it was. A killed collection goes on where it was, as an evaluation does.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Protocol

from pask import __version__
from pask.bfcl.data import Row, data_digest, load_rows, subset_of
from pask.bfcl.request import Request, RequestBuilder
from pask.bfcl.splits import build_splits
from pask.config import RunConfig
from pask.digests import digest
from pask.engine.decode import generate
from pask.engine.generation import Limits, Task
from pask.engine.kernel_body import kernel_body
from pask.engine.kv_store import KV_DTYPES
from pask.engine.loading import ModelFiles, tokenizer_info
from pask.engine.trajectories import Header, Maker, Trajectory, open_writer, write
from pask.errors import PaskError, known_names
from pask.evaluation.keys import RESULTS
from pask.evaluation.model import load, load_files
from pask.methods.full import FullKV
from pask.peers.vllm import VllmEngine
from pask.progress import Progress
from pask.provenance import source_digest, versions

EngineName = Literal["pask", "vllm"]


class Answer(Protocol):
    """What both engines' answers have."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def finish(self) -> Literal["stop", "length"]: ...


Ask = Callable[[Iterable[Request]], Generator[Answer, None, None]]


def trajectory_file(config: RunConfig, part: str) -> Path:
    """The collected answers of a part ("cal", "dev" or "test"), whoever gave them."""
    return RESULTS / config.run / "trajectories" / f"{part}.jsonl"


def header_of(config: RunConfig, model_digest: str, vocab_size: int) -> Header:
    """What the run asks: what `pask.engine.trajectories.read` has to find in its files."""
    return Header(
        model=model_digest,
        vocab_size=vocab_size,
        prompt=config.model.prompt,
        answer_form=config.model.answer_form,
        max_new_tokens=config.max_new_tokens,
        grammar=f"xgrammar {importlib.metadata.version('xgrammar')}",
        data=data_digest(),
    )


def collect(
    config: RunConfig, part: str, engine: EngineName = "pask", sample: int | None = None
) -> Path:
    """Answer the rows of a part under Full KV; the file's path.

    They are the run's sample of it, or the first `sample` of each category.

    Writes `trajectory_file`, rows in the split's order. What is finished is kept in
    results/<run>/parts/trajectories-<engine>-<key>, so nothing is asked twice and answers of
    another model, setting, engine or version are never mixed in. PaskError for an unknown part or
    engine, a model or row that cannot be used, and where vLLM is asked for and not installed.
    """
    if engine not in _ENGINES:
        raise PaskError(f"unknown engine {engine!r}", todo=known_names(engine, _ENGINES))
    rows = load_rows()
    splits = build_splits(rows, config.data.split, config.data.seed)
    own = config.data.sample_of(part) if sample is None else None
    ids = [i for group in splits.sample(part, own).values() for i in group[:sample]]
    model = load_files(config)
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    header = header_of(config, model.digest, model.layout.vocab_size)
    with _ENGINES[engine](config, model, builder, [rows[i] for i in ids]) as (maker, ask):
        key = digest({"asked": asdict(header), "made_by": asdict(maker)})[:16]
        folder = RESULTS / config.run / "parts" / f"trajectories-{engine}-{key}"
        with open_writer(folder / f"{part}.jsonl", header, maker) as writer:
            missing = [rows[i] for i in ids if i not in writer.done]
            what = f"trajectories {config.run} {part} ({engine})"
            with Progress(what, len(ids), done=len(ids) - len(missing)) as progress:
                for trajectory in _answered(ask, builder, missing):
                    writer.append(trajectory)
                    progress.advance()
            path = trajectory_file(config, part)
            write(path, header, maker, [writer.done[i] for i in ids])
    return path


def _answered(ask: Ask, builder: RequestBuilder, rows: Sequence[Row]) -> Iterator[Trajectory]:
    """Requests are built one at a time, as the engine asks for them, and not kept."""
    asked: dict[str, tuple[int, str]] = {}

    def requests() -> Iterator[Request]:
        for row in rows:
            request = builder.build(row)
            asked[request.id] = len(request.prompt_ids), request.prompt_digest
            yield request

    with closing(ask(requests())) as answers:
        for answer in answers:
            prompt_tokens, prompt_digest = asked.pop(answer.request_id)
            yield Trajectory(
                answer.request_id, answer.token_ids, answer.finish, prompt_tokens, prompt_digest
            )


@contextmanager
def _pask(
    config: RunConfig, _: ModelFiles, builder: RequestBuilder, rows: Sequence[Row]
) -> Iterator[tuple[Maker, Ask]]:
    """Our engine, which computes in fp32 and stores keys and values as the run says."""
    model = load(config)
    categories = {row.id: row.category for row in rows}

    def ask(requests: Iterable[Request]) -> Generator[Answer, None, None]:
        expected = config.model.expected_new_tokens
        tasks = (
            Task(r, (("full", FullKV()),), expected[subset_of(categories[r.id])]) for r in requests
        )
        return generate(
            model,
            tasks,
            Limits(config.max_new_tokens),
            max_batch=config.engine.max_batch,
            kv_dtype=KV_DTYPES[config.engine.kv_dtype],
            capacity_tokens=config.engine.kv_capacity_tokens,
        )

    source = source_digest(
        "pask.engine.decode",
        "pask.engine.loading",
        "pask.bfcl.request",
        "kernels.cpu",
        "kernels.reference",
    )
    kv_dtype = config.engine.kv_dtype
    decisive = versions() | {"kernels": kernel_body()}
    yield Maker("pask", __version__, "float32", kv_dtype, decisive, source), ask


@contextmanager
def _vllm(
    config: RunConfig, model: ModelFiles, builder: RequestBuilder, rows: Sequence[Row]
) -> Iterator[tuple[Maker, Ask]]:
    """vLLM, in float32 on a CPU and in the model's own type elsewhere, KV in the same type."""
    prompts = (len(builder.prompt(row)[1]) for row in rows)
    longest = max(prompts, default=0) + config.max_new_tokens
    max_batch = config.engine.max_batch
    with VllmEngine(
        model.folder, model.layout, tokenizer_info(model), longest=longest, max_batch=max_batch
    ) as engine:

        def ask(requests: Iterable[Request]) -> Generator[Answer, None, None]:
            return engine.generate(requests, Limits(config.max_new_tokens))

        source = source_digest("pask.peers.vllm", "pask.bfcl.request")
        yield (
            Maker("vllm", engine.version, engine.dtype, engine.kv_dtype, versions(), source),
            ask,
        )


_Opened = AbstractContextManager[tuple[Maker, Ask]]
_ENGINES: dict[str, Callable[[RunConfig, ModelFiles, RequestBuilder, Sequence[Row]], _Opened]] = {
    "pask": _pask,
    "vllm": _vllm,
}
