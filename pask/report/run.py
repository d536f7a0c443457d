"""Makes a run's tables and figures from its long table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from pask.bfcl.ceiling import Ceiling
from pask.bfcl.splits import Splits
from pask.calibration.families import families_to_make, method_without_policy, policy_families
from pask.calibration.policies import read_family_policy
from pask.config import RunConfig
from pask.errors import PaskError
from pask.evaluation import keys
from pask.evaluation.model import load_files
from pask.methods.registry import method_class, registry
from pask.paths import CONFIGS
from pask.report.figures import accuracy_figure
from pask.report.long import read_long
from pask.report.pairs import pair_table
from pask.report.paper import paper_accuracy
from pask.report.policy_page import write_policy_page
from pask.report.render import write_errors, write_pairs, write_tables
from pask.report.tables import accuracy_table, error_table


def _labels() -> dict[str, str]:
    return {name: cls.label for name, cls in registry().items()}


def _frame(config: RunConfig) -> tuple[pd.DataFrame, pd.DataFrame, Splits]:
    """The run's long table, its accuracy table and its splits."""
    path = keys.RESULTS / config.run / "long.csv"
    long = read_long(path)
    made = keys.check_made_for(config, path)
    splits = keys.read_splits(config)
    sample = splits.sample(config.data.part, config.data.sample)
    frame = accuracy_table(
        long,
        paper_accuracy(),
        {category: len(ids) for category, ids in sample.items()},
        entries=config.entries,
        labels=_labels(),
        split_sizes=splits.sizes(config.data.part),
        paper_model=config.paper_model,
        not_reachable=made.get("not_reachable", ()),
    )
    return long, frame, splits


def _notes(config: RunConfig, splits: Splits, long: pd.DataFrame) -> Sequence[str]:
    sample = splits.sample(config.data.part, config.data.sample)
    ids = [row_id for group in sample.values() for row_id in group]
    passable = Ceiling.read(CONFIGS / "bfcl-ceiling.json").passable(ids)
    cut = long[long["finish"] == "length"].groupby("entry", sort=False).size()
    cut_off = ", ".join(f"{entry} {n}" for entry, n in cut.items()) or "none"
    knobs = "Knobs follow from the budgets alone."
    if config.budget.search:
        knobs = (
            f"Knobs were set by the bytes of {_rows_of(config, splits, 'dev')}, along Full KV's "
            "answers to them."
        )
    made = {entry.method for entry in families_to_make(config).values()}
    calibrated = sorted(
        {e.method for e in config.entries if method_class(e.method).calibrated} | made
    )
    if calibrated:
        rows = _rows_of(config, splits, "cal")
        knobs += f" Calibrated on {rows}: {', '.join(calibrated)}."
    if made:
        rows = _rows_of(config, splits, "dev")
        knobs += f" Policies were selected on {rows}: {', '.join(sorted(made))}."
    for family, entry in policy_families(config).items():
        if given := method_without_policy(entry).policy_file:
            knobs += f" {family} follows a policy that was made before: {given}."
    return [
        knobs,
        f"Prompt {config.model.prompt}, answer form {config.model.answer_form}, greedy decoding "
        f"under the grammar, at most {config.max_new_tokens} new tokens (answers cut off by "
        f"that limit, which count as wrong: {cut_off}).",
        f"Ceiling: {passable} of these {len(ids)} rows can be passed by an output that the "
        "grammar allows (configs/bfcl-ceiling.json).",
        f"Split {splits.kind}, seed {splits.seed}, digest {splits.digest[:16]}. "
        f"KV stored as {config.engine.kv_dtype}, in pages of {config.engine.page_slots} slots.",
    ]


def _rows_of(config: RunConfig, splits: Splits, part: str) -> str:
    """How many rows of a part the run was set up with, and how many of them are in its tables."""
    names = {"cal": "calibration", "dev": "development"}
    used = {i for group in splits.sample(part, config.data.sample_of(part)).values() for i in group}
    shown = splits.sample(config.data.part, config.data.sample).values()
    both = len(used & {i for group in shown for i in group})
    among = f", {both} of them among this table's" if both else ""
    return f"{len(used)} {names[part]} rows{among}"


def tables(config: RunConfig) -> list[Path]:
    """Write results/<run>/tables/{accuracy,pairs,errors}.*; the paths written."""
    long, frame, splits = _frame(config)
    folder = keys.RESULTS / config.run / "tables"
    title = f"{config.model.name}: BFCL accuracy by KV method"
    notes = _notes(config, splits, long)
    written = write_tables(frame, folder, "accuracy", title, notes)
    title = f"{config.model.name}: methods of one target against each other"
    written += write_pairs(pair_table(long, frame), frame, folder, "pairs", title)
    smoke = frame["smoke"].iloc[0]
    errors = error_table(long, entries=config.entries, labels=_labels(), smoke=smoke)
    return written + write_errors(errors, folder, "errors", f"{config.model.name}: what went wrong")


def figures(config: RunConfig) -> list[Path]:
    """Write results/<run>/figures/accuracy.*; the paths written."""
    _, frame, _ = _frame(config)
    styles = {name: (cls.color, cls.marker) for name, cls in registry().items()}
    return accuracy_figure(frame, keys.RESULTS / config.run / "figures", styles)


def policy_page(config: RunConfig) -> list[Path]:
    """Write the page on the run's policies into results/<run>/policy_page; the paths written.

    PaskError where no method of the run follows a policy, or its policy is missing.
    """
    families = policy_families(config)
    if not families:
        raise PaskError("no method of this run follows a policy", where=f"run {config.run}")
    digest = load_files(config).digest
    policies = {
        family: read_family_policy(config, entry, digest) for family, entry in families.items()
    }
    path = keys.RESULTS / config.run / "long.csv"
    long = read_long(path) if path.is_file() else None
    if long is not None:
        keys.check_made_for(config, path)
    return write_policy_page(config, policies, long, keys.RESULTS / config.run / "policy_page")
