"""The page on structural tags: how many tokens of the calibration rows each bucket holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pask.errors import PaskError
from pask.files import write_text
from pask.report.blocks import NOTHING, Block, Line
from pask.report.render import html, markdown
from pask.report.statistics import rounded

_COUNTS = {
    "stage": str, "bucket": str, "group": int, "first_layer": int, "last_layer": int,
    "tokens": int, "requests": int, "share": float, "example": str,
}  # fmt: skip
_LABELS = {"label": str, "tokens": int, "requests": int, "share": float, "protected": str}
_TODO = "run pask tags again"


@dataclass(frozen=True)
class Counts:
    """What `pask.evaluation.tags` wrote of a run, read back and found to belong together."""

    about: Mapping[str, Any]
    buckets: pd.DataFrame
    labels: pd.DataFrame


def read_counts(folder: Path) -> Counts:
    """Read manifest.json, buckets.csv and prompt_tokens.csv of results/<run>/tags.

    PaskError where one is missing or damaged, or where their sums do not agree.
    """
    path = folder / "manifest.json"
    buckets = _read_table(folder / "buckets.csv", _COUNTS)
    labels = _read_table(folder / "prompt_tokens.csv", _LABELS)
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        expected = about["answer_tokens"], about["prompt_tokens"], about["prompt_tokens"]
        _notes(about)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PaskError(
            "cannot read the manifest", where=str(path), why=str(error), todo=_TODO
        ) from error
    first = buckets[buckets["group"] == 0].groupby("stage")["tokens"].sum()
    found = first.get("decode", 0), first.get("prompt", 0), labels["tokens"].sum()
    if found != expected:
        raise PaskError(
            "the counts do not belong together",
            where=str(folder),
            why=f"answer tokens, prompt tokens in buckets and by label: {_listed(found)}; the "
            f"manifest says {_listed(expected)}",
            todo=_TODO,
        )
    return Counts(about, buckets, labels)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def _read_table(path: Path, columns: Mapping[str, type]) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, dtype=dict(columns), keep_default_na=False)
    except (OSError, ValueError, TypeError) as error:
        raise PaskError(
            "cannot read the counts", where=str(path), why=str(error), todo=_TODO
        ) from error
    if missing := [name for name in columns if name not in frame.columns]:
        raise PaskError(f"the counts lack {', '.join(missing)}", where=str(path), todo=_TODO)
    return frame


def write_page(folder: Path) -> list[Path]:
    """Write tags.md and tags.html beside the counts in results/<run>/tags; the paths.

    PaskError as `read_counts` raises it.
    """
    counts = read_counts(folder)
    about = counts.about
    title = f"{about['model']}: structural tags of the calibration rows"
    smoke = ""
    if about["sample"] is not None:
        ran = about["rows"] + len(about["left_out"])
        smoke = f"Sample of {ran:,} of {about['split_rows']:,} calibration rows."
    blocks, notes = _blocks(counts), _notes(about)
    texts = {
        "tags.md": markdown(title, smoke, blocks, notes),
        "tags.html": html(title, smoke, blocks, notes),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def _blocks(counts: Counts) -> list[Block]:
    one_group = counts.buckets[counts.buckets["group"] == 0]
    decode = one_group[one_group["stage"] == "decode"]
    there = decode[decode["tokens"] > 0]
    examples = one_group[one_group["stage"] == "prompt"].set_index("bucket")["example"]
    rows = counts.about["rows"]
    common = (("tokens",), ("share", "%"), ("requests", f"of {rows:,}"))
    return [
        Block(
            f"Answer tokens by bucket: {len(there)} of {len(decode)} buckets occur",
            (("bucket", counts.about["coarsening"]), *common, ("an example", "⟦token⟧")),
            tuple(
                Line(((row["bucket"],), *_counted(row), _shown(row["example"])))
                for row in there.to_dict("records")
            ),
        ),
        Block(
            "Prompt tokens by label",
            (("label",), *common, ("protected",), ("an example", "⟦token⟧")),
            tuple(
                Line(
                    (
                        (row["label"],),
                        *_counted(row),
                        (row["protected"],),
                        _shown(examples.get(row["label"], "")),
                    )
                )
                for row in counts.labels.to_dict("records")
            ),
        ),
    ]


def _counted(row: Mapping[Any, Any]) -> tuple[tuple[str, ...], ...]:
    share = rounded(100 * row["share"], 2)
    return (f"{row['tokens']:,}",), (share,), (f"{row['requests']:,}",)


def _shown(example: str) -> tuple[str, ...]:
    return (example,) if example else NOTHING


def _notes(about: Mapping[str, Any]) -> list[str]:
    starts = about["first_layers"]
    ends = [*starts[1:], about["layers"]]
    layers = ", ".join(f"{a}–{b - 1}" for a, b in zip(starts, ends, strict=True))
    left_out = about["left_out"]
    notes = [
        f"Split {about['split']}, seed {about['split_seed']}, digest "
        f"{about['split_digest'][:16]}: {about['rows']:,} rows, "
        f"{about['answer_tokens']:,} answer tokens, {about['prompt_tokens']:,} prompt tokens.",
        "Answers are passing gold answers, not a model's output: of every argument the first gold "
        "alternative that is a value and that the checker and the grammar take; an argument is "
        "left out where leaving it out is the only one. The stop token is no part of them.",
        f"Tokens of {about['model']}'s tokenizer; prompt {about['prompt']}, answer form "
        f"{about['answer_form']}.",
        f"A bucket is the coarsened tag ({about['coarsening']}) with a group of layers; the groups "
        f"are layers {layers}. A token has the same tag in all layers, so it counts once in each "
        "group (buckets.csv); exact tags are in answer_tokens.csv.",
        "Free: the grammar left a choice for at least one byte of the token; forced: for none. "
        "Critical: it leaves one for the next byte, and that byte decides on a name, a key, a "
        "value or whether to go on; not_critical: such a choice is further ahead, or none comes. "
        "A token that spans several things counts as the most consequential one.",
        "function_selector: which function; enum: a value from a list of the schema's; nested_*: "
        "inside a list or object that is an argument's value; call_boundary: where calls begin and "
        "end; argument_boundary: brackets and commas of the arguments; layout: fixed text. "
        "tool_scaffold: punctuation and fixed keys of the tool list; chat_scaffold: what the chat "
        "template adds. Protected: nothing else in a request can stand in for it.",
        "An example is the bucket's most frequent token, in brackets, where it occurs first.",
    ]
    if left_out:
        names = ", ".join(sorted(left_out))
        notes.append(f"Left out, since no answer can pass: {len(left_out)} ({names}).")
    return notes
