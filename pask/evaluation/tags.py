"""Counts what there is to decide about: the calibration rows' tokens by tag, label and bucket.

Of each row the whole prompt and a passing gold answer, not a model's output: what an answer that
counts as right is made of. Only the tokenizer is used; no model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pask.bfcl.answers import render
from pask.bfcl.ceiling import Unpassable, passing_answer
from pask.bfcl.data import Row, load_rows
from pask.bfcl.request import Request, RequestBuilder
from pask.bfcl.splits import build_splits
from pask.config import RunConfig
from pask.engine.vocabulary import Vocabulary
from pask.errors import HarnessFault, PaskError
from pask.evaluation.keys import RESULTS
from pask.evaluation.model import load_vocabulary
from pask.evaluation.tag_tables import TaggedRow, answer_table, bucket_table, example, prompt_table
from pask.files import write_json, write_text
from pask.progress import Progress
from pask.provenance import versions
from pask.structure.buckets import layer_groups
from pask.structure.tracker import Tracker

PART = "cal"


def folder_of(config: RunConfig) -> Path:
    return RESULTS / config.run / "tags"


def count_tags(config: RunConfig, sample: int | None = None) -> list[Path]:
    """Tag the calibration rows (at most `sample` a category) and count, into results/<run>/tags.

    Writes answer_tokens.csv, prompt_tokens.csv, buckets.csv, example.json (one row, for the
    picture) and manifest.json; the paths. PaskError for a model, row or setting that cannot be
    used; HarnessFault where the tag grammar refuses a passing answer.
    """
    rows = load_rows()
    splits = build_splits(rows, config.data.split, config.data.seed)
    ids = [i for group in splits.sample(PART).values() for i in group[:sample]]
    vocabulary = load_vocabulary(config)
    groups = layer_groups(vocabulary.layers, config.structure.layer_groups)
    coarsening = config.structure.coarsening
    left_out: dict[str, str] = {}
    tagged = list(_tagged(config, vocabulary, [rows[i] for i in ids], left_out))
    if not tagged:
        raise PaskError("no row has a passing answer", where=f"{config.data.split}/{PART}")
    folder = folder_of(config)
    tables = {
        "answer_tokens.csv": answer_table(tagged),
        "prompt_tokens.csv": prompt_table(tagged),
        "buckets.csv": bucket_table(tagged, coarsening, groups),
    }
    for name, table in tables.items():
        write_text(folder / name, str(table.to_csv(index=False, lineterminator="\n")))
    about = {
        "model": config.model.name,
        "prompt": config.model.prompt,
        "answer_form": config.model.answer_form,
        "split": f"{config.data.split}/{PART}",
    }
    write_json(folder / "example.json", about | example(tagged))
    write_json(
        folder / "manifest.json",
        about
        | {
            "tokenizer_sha256": vocabulary.tokenizer_sha256,
            "split_seed": config.data.seed,
            "split_digest": splits.digest,
            "split_rows": sum(splits.sizes(PART).values()),
            "sample": sample,
            "rows": len(tagged),
            "left_out": left_out,
            "answer_tokens": sum(len(row.answer) for row in tagged),
            "prompt_tokens": sum(len(row.prompt) for row in tagged),
            "coarsening": coarsening,
            "layers": vocabulary.layers,
            "first_layers": [group.start for group in groups],
            "config": config.digest,
            "versions": versions(),
        },
    )
    return [folder / name for name in (*tables, "example.json", "manifest.json")]


def _tagged(
    config: RunConfig, vocabulary: Vocabulary, rows: Sequence[Row], left_out: dict[str, str]
) -> Iterator[TaggedRow]:
    """The rows that have a passing answer, tagged; the others' ids and reasons go to `left_out`."""
    model = config.model
    builder = RequestBuilder(vocabulary.tokenizer, vocabulary.info, model.prompt, model.answer_form)
    texts = vocabulary.info.decoded_vocab
    with Progress(f"tags {config.run}", len(rows)) as progress:
        for row in rows:
            calls = passing_answer(row)
            if isinstance(calls, Unpassable):
                left_out[row.id] = f"{calls.reason}: {calls.detail}"
            else:
                request = builder.build(row)
                answer = render(calls, model.answer_form, row.functions)
                yield tag_row(request, answer, vocabulary.tokenizer, texts)
            progress.advance()


def tag_row(
    request: Request, answer: str, tokenizer: PreTrainedTokenizerBase, texts: Sequence[bytes]
) -> TaggedRow:
    """A request and one of its answers, token by token.

    `texts`: every token's bytes (empty for control tokens, which are shown by name in the prompt).
    PaskError where the answer's tokens do not spell it; HarnessFault where the grammar refuses it.
    """
    where = f"row {request.id}"
    prompt = request.prompt_ids
    # In its place, since a tokenizer may write a text's first token otherwise than a later one.
    whole = tokenizer(request.prompt_text + answer, add_special_tokens=False)["input_ids"]
    if tuple(whole[: len(prompt)]) != prompt:
        whole = [*prompt, *tokenizer(answer, add_special_tokens=False)["input_ids"]]
    tokens = [texts[token] for token in whole[len(prompt) :]]
    if b"".join(tokens) != answer.encode():
        raise PaskError(
            "the tokens of the answer do not spell it",
            where=where,
            why="the tokenizer changes text",
            todo="take the tokenizer that belongs to the model, in its fast form",
        )
    tracker = Tracker(request.tag_grammar)
    try:
        tags = [tracker.accept(token) for token in tokens]
    except ValueError as error:
        raise HarnessFault(
            "the tag grammar refuses a passing answer", where=where, why=str(error)
        ) from error
    if not tracker.can_end:
        raise HarnessFault("the tag grammar does not let a passing answer end", where=where)
    shown = [
        texts[token] or str(tokenizer.convert_ids_to_tokens(token)).encode() for token in prompt
    ]
    return TaggedRow(
        id=request.id,
        prompt=tuple(zip(shown, request.prompt_labels, strict=True)),
        answer=tuple(zip(tokens, tags, strict=True)),
    )
