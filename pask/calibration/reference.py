"""A part's rows with Full KV's answers to them: what interventions and candidates start from."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pask.bfcl.data import Row, load_rows, subset_of
from pask.bfcl.early_verdict import EarlyVerdict
from pask.bfcl.request import RequestBuilder
from pask.calibration.intervention import Buckets, changeable
from pask.config import RunConfig
from pask.engine import trajectories
from pask.engine.generation import Generation, Task
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.engine.replay import Replayer
from pask.engine.replay_job import GiveUp
from pask.engine.trace import Trace
from pask.evaluation.judge import judge
from pask.evaluation.trajectories import header_of, trajectory_file
from pask.methods.full import FullKV
from pask.structure.buckets import bucket_name

Judge = Callable[[Generation], bool]
"""Whether an answer is right."""


@dataclass(frozen=True)
class ReferenceRow:
    """A row, the task that it is, and the tokens of an answer to it under Full KV."""

    row: Row
    task: Task
    tokens: tuple[int, ...]
    answer_form: str

    def judge(self, answer: Generation) -> bool:
        """The official checker's verdict."""
        record = {"finish": answer.finish, "text": answer.text}
        return judge(self.row, record, self.answer_form).correct

    @cached_property
    def hopeless(self) -> GiveUp:
        """Whether no right answer begins with a text."""
        return EarlyVerdict(self.row, self.answer_form).hopeless


def reference_rows(
    config: RunConfig, model: LoadedModel, part: str, ids: Sequence[str]
) -> Iterator[ReferenceRow]:
    """Rows of a part, one after another; PaskError where there is no answer to one."""
    rows = load_rows()
    header = header_of(config, model.digest, model.layout.vocab_size)
    answers = trajectories.read(trajectory_file(config, part), header)
    builder = RequestBuilder(
        model.tokenizer, tokenizer_info(model), config.model.prompt, config.model.answer_form
    )
    for row in (rows[i] for i in ids):
        request = builder.build(row)
        expected = config.model.expected_new_tokens[subset_of(row.category)]
        task = Task(request, (("full", FullKV()),), expected)
        yield ReferenceRow(row, task, answers.of(request).token_ids, config.model.answer_form)


@dataclass(frozen=True)
class Reference:
    """A row's answer under Full KV: the trace that interventions are replayed on, and its verdict.

    `names`: the bucket name of each fed token, in order; `labels`: the prompt's tokens by label
    value, of those that may be changed.
    """

    trace: Trace
    correct: bool
    names: tuple[str, ...]
    labels: Mapping[str, int]


def read_reference(
    replayer: Replayer,
    task: Task,
    tokens: Sequence[int],
    judge: Judge,
    *,
    buckets: Buckets,
    sinks: int,
) -> Reference:
    """Read a task's request and `tokens`, a Full-KV answer to it; errors as `Replayer.trace`.

    The answer may be another engine's and differ from ours where two tokens are nearly as good.
    Then ours takes its place: both terms of Equation 5 come from one engine. The trace is the
    caller's to free.
    """
    trace = replayer.trace(task, tokens)
    (own,) = replayer.replay(trace, [("full", FullKV())])
    if own.first_difference is not None:
        replayer.free(trace)
        trace = replayer.trace(task, own.generation.token_ids)
    names = []
    for decoded in trace.decoded[: trace.fed]:
        if decoded.tag is None:
            raise ValueError(f"{task.request.id}: buckets are made of tags, its answer has none")
        names.append(bucket_name(decoded.tag, buckets.coarsening))
    if task.request.prompt_labels is None:
        raise ValueError(f"{task.request.id}: buckets are made of labels, its prompt has none")
    prompt = task.request.prompt_labels
    labels = Counter(prompt[n].value for n in changeable(prompt, sinks))
    return Reference(trace, judge(own.generation), tuple(names), labels)


def replayed_part(reference: Reference, hopeless: GiveUp | None) -> Trace:
    """What interventions are replayed on: the reference's trace up to the token with which its
    answer becomes hopeless, or all of it."""
    trace = reference.trace
    if hopeless is None or reference.correct:
        return trace
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = ""
    for tokens, decoded in enumerate(trace.decoded, start=1):
        text += decoder.decode(decoded.text)
        if hopeless(text):
            return _beginning(trace, tokens)
    return trace


def _beginning(trace: Trace, tokens: int) -> Trace:
    """The trace's first tokens, at least one, as if the answer had been cut off there."""
    fed = tokens - 1
    return replace(
        trace,
        tokens=trace.tokens[:tokens],
        ended=False,
        decoded=trace.decoded[:tokens],
        inputs=tuple(rows[:fed] for rows in trace.inputs),
        keys=tuple(rows[:fed] for rows in trace.keys),
        values=tuple(rows[:fed] for rows in trace.values),
        outputs=tuple(rows[:fed] for rows in trace.outputs),
        masks=trace.masks[:tokens],
        chosen=trace.chosen[:tokens],
    )
