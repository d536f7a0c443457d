"""A part's rows with Full KV's answers to them: what interventions and candidates start from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pask.bfcl.data import Row, load_rows, subset_of
from pask.bfcl.request import RequestBuilder
from pask.config import RunConfig
from pask.engine import trajectories
from pask.engine.generation import Generation, Task
from pask.engine.loading import LoadedModel, tokenizer_info
from pask.evaluation.judge import judge
from pask.evaluation.trajectories import header_of, trajectory_file
from pask.methods.full import FullKV


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
