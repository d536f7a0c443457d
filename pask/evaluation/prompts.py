"""Chooses a model's prompt and answer form on the calibration split, with Full KV alone.

Methods can only be told apart where Full KV answers well, so this is settled before any method is
compared, on rows that no comparison uses, and every trial's counts are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from pask.bfcl.answers import check_answer_form
from pask.bfcl.chat import NoToolTemplate
from pask.bfcl.data import CATEGORIES, SUBSETS, load_rows
from pask.bfcl.prompts import style_named
from pask.bfcl.splits import Splits, build_splits
from pask.config import Entry, RunConfig
from pask.errors import PaskError
from pask.evaluation import keys
from pask.evaluation.judge import calls_of
from pask.evaluation.parts import read_part
from pask.evaluation.run import evaluate
from pask.evaluation.score import long_table
from pask.files import write_json, write_text
from pask.methods.full import FullKV

Trial = dict[str, Any]


def trial_file(config: RunConfig, style: str, answer_form: str) -> Path:
    return keys.RESULTS / config.run / "prompts" / f"{style}.{answer_form}.json"


def trial_config(config: RunConfig, style: str, answer_form: str, sample: int | None) -> RunConfig:
    """The run with another prompt, on the calibration rows (at most `sample` a category)."""
    trial = replace(
        config,
        run=f"{config.run}/prompts/{style}.{answer_form}",
        model=replace(config.model, prompt=style, answer_form=answer_form),
        data=replace(config.data, part="cal", sample=None),
        entries=(Entry("full", "full", 1.0, {}),),
    )
    if sample is None:
        return trial
    sizes = build_splits(load_rows(), config.data.split, config.data.seed).sizes("cal")
    smaller = {category: min(sample, n) for category, n in sizes.items()}
    return replace(trial, data=replace(trial.data, sample=smaller))


def run_trial(config: RunConfig, style: str, answer_form: str, sample: int | None = None) -> Path:
    """Answer the calibration rows with one prompt style and answer form; writes the counts.

    A native style on a chat template without tools is written down as not available. Raises
    PaskError for an unknown style or form.
    """
    style_named(style)
    check_answer_form(answer_form)
    trial = trial_config(config, style, answer_form, sample)
    splits = build_splits(load_rows(), trial.data.split, trial.data.seed)
    splits.write(keys.splits_file(trial))
    path = trial_file(config, style, answer_form)
    try:
        evaluate(trial)
    except NoToolTemplate as error:
        write_json(path, {"style": style, "answer_form": answer_form, "not_available": error.what})
    else:
        write_json(path, _counts(trial, splits))
    return path


def _counts(trial: RunConfig, splits: Splits) -> Trial:
    rows = load_rows()
    predictions = keys.prediction_file(trial, trial.entries[0], 0, 1)
    ids = splits.sample("cal", trial.data.sample)
    full = trial.entries[0].name
    long = long_table(trial, ids, {full: [predictions]}, {full: FullKV()})
    calls = {"right": 0, "too_many": 0, "too_few": 0, "malformed": 0}
    for record in read_part(predictions):
        answer = calls_of(record, trial.model.answer_form)
        excess = None if answer is None else len(answer) - len(rows[record["id"]].gold)
        calls[_call_count(excess)] += 1
    by_category = long.groupby("category")["correct"].agg(["sum", "count"])
    return {
        "model": trial.model.name,
        "style": trial.model.prompt,
        "answer_form": trial.model.answer_form,
        "split": f"{trial.data.split}/cal",
        "split_digest": splits.digest,
        "max_new_tokens": trial.max_new_tokens,
        "k": int(long["correct"].sum()),
        "n": len(long),
        "categories": {
            c: {"k": int(by_category.loc[c, "sum"]), "n": int(by_category.loc[c, "count"])}
            for c in CATEGORIES
            if c in by_category.index
        },
        "number_of_calls": calls,
        "cut_off": int((long["finish"] == "length").sum()),
        "mean_prompt_tokens": round(float(long["prompt_tokens"].mean()), 1),
        "mean_new_tokens": {
            subset: round(_weighted_mean(long, splits.sizes("cal"), names), 1)
            for subset, names in SUBSETS.items()
        },
    }


def _weighted_mean(long: pd.DataFrame, sizes: Mapping[str, int], names: Sequence[str]) -> float:
    """Mean answer length of a subset, its categories weighted as in the whole split."""
    means = long.groupby("category")["new_tokens"].mean()
    there = [name for name in names if name in means.index]
    return sum(sizes[n] * float(means[n]) for n in there) / sum(sizes[n] for n in there)


def _call_count(excess: int | None) -> str:
    if excess is None:
        return "malformed"
    return "right" if excess == 0 else "too_many" if excess > 0 else "too_few"


def best(trials: Iterable[Trial]) -> Trial:
    """The trial with the most right answers; of equals the one with the shorter prompt."""
    return max(trials, key=lambda t: (t["k"] / t["n"], -t["mean_prompt_tokens"]))


def trials_table(trials: Sequence[Trial]) -> str:
    """The trials as a Markdown table, the best first, one row each."""
    ordered = sorted(trials, key=lambda t: (-t["k"] / t["n"], t["mean_prompt_tokens"]))
    categories = [c for c in CATEGORIES if any(c in t["categories"] for t in trials)]
    head = ["prompt", "answer form", "right", *categories, "calls right / more / fewer"]
    head += ["cut off", "mean new tokens, non-live / live"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for t in ordered:
        cells = [t["style"], t["answer_form"], f"{t['k']}/{t['n']}"]
        for category in categories:
            count = t["categories"].get(category)
            cells.append(f"{count['k']}/{count['n']}" if count else "")
        calls = t["number_of_calls"]
        cells.append(f"{calls['right']} / {calls['too_many']} / {calls['too_few']}")
        mean = t["mean_new_tokens"]
        cells += [str(t["cut_off"]), " / ".join(f"{mean[subset]:g}" for subset in SUBSETS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_comparison(config: RunConfig) -> Path:
    """Gather the finished trials of a run into results/<run>/prompts/trials.md."""
    folder = keys.RESULTS / config.run / "prompts"
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    trials = [trial for trial in found if "not_available" not in trial]
    if not trials:
        raise PaskError("no prompt trial is finished", where=str(folder), todo="run pask prompts")
    for key in ("n", "split_digest", "max_new_tokens", "model"):
        if len({trial[key] for trial in trials}) > 1:
            raise PaskError(
                f"the trials differ in {key}",
                where=str(folder),
                todo="delete those that do not belong to the comparison",
            )
    chosen = best(trials)
    text = f"{chosen['model']}, split {chosen['split']}, Full KV, at most "
    text += f"{chosen['max_new_tokens']} new tokens.\n\n{trials_table(trials)}"
    for trial in sorted(found, key=lambda t: (t["style"], t["answer_form"])):
        if "not_available" in trial:
            text += f"\nNot run: {trial['style']}, {trial['answer_form']}: "
            text += f"{trial['not_available']}.\n"
    text += f"\nBest: prompt {chosen['style']}, answer form {chosen['answer_form']}.\n"
    path = folder / "trials.md"
    write_text(path, text)
    return path
