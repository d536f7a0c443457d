"""The page on a run's policies: what they are, what they rest on, the paper's figures beside."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from pask.config import RunConfig
from pask.files import write_text
from pask.policy.policy import Policy
from pask.report.paper import read_table
from pask.report.policy_blocks import (
    ablation_block,
    correlation_block,
    selection_block,
    thresholds_block,
)
from pask.report.policy_correlation import RankCorrelation, rank_correlation
from pask.report.policy_figures import cost_figure, mismatch_figure
from pask.report.policy_frames import (
    bucket_frame,
    candidate_frame,
    default_family,
    frontier,
    sides_of,
)
from pask.report.policy_heat_map import heat_map
from pask.report.policy_notes import policy_notes, smoke
from pask.report.policy_selection import selection_table
from pask.report.policy_tables import ablation_table, of_test, thresholds_table
from pask.report.render import html, latex, markdown

FEW_ROWS = 100  # below so many rows of calibration or development a policy is a sample's


def write_policy_page(
    config: RunConfig, policies: Mapping[str, Policy], long: pd.DataFrame | None, out: Path
) -> list[Path]:
    """Write policies.md, .html and .tex, the tables and points as CSV and three figures into `out`.

    `policies` by family; `long` is the run's long table where there is one. Tables are of all
    families, figures of the default one (`default_family`). The same arguments give the same bytes.
    The paths written; ValueError for no policies.
    """
    if not policies:
        raise ValueError("policy page: there are no policies")
    family = default_family(policies)
    sides = sides_of(policies[family])
    buckets = pd.concat([bucket_frame(side) for side in sides], ignore_index=True)
    found = correlations(buckets)
    selection = selection_table(policies, long, config.entries)
    ablation = ablation_table(policies, read_table(4), long, config.entries)
    thresholds = thresholds_table(policies[family].decode, read_table(5))
    tables = {
        "selection": selection,
        "ablation": ablation,
        "thresholds": thresholds,
        "buckets": buckets,
        "candidates": _together([candidate_frame(side) for side in sides]),
        "frontier": _together([frontier(side) for side in sides]),
        "correlation": _correlation_frame(found),
    }
    zero = (buckets["lost"] == buckets["gained"]).groupby([buckets["side"], buckets["level"]]).sum()
    blocks = [
        selection_block(selection),
        ablation_block(ablation),
        thresholds_block(thresholds, 100 * policies[family].decode.alpha),
        correlation_block(found, zero),
    ]
    title = f"{config.model.name}: policies and what they rest on"
    warning = smoke(selection, FEW_ROWS)
    elsewhere = str(long["split"].iloc[0]) if long is not None and of_test(long) is None else ""
    notes = policy_notes(config, policies, family, buckets, elsewhere)
    about = f"{config.model.name}, {family}\n{warning}".strip()
    written = _figures(tables, policies[family], found, out, about)
    pictures = [path.name for path in written if path.suffix == ".png"]
    shown = "".join(_picture(path) for path in written if path.suffix == ".svg")
    links = "".join(f"![{Path(name).stem}]({name})\n\n" for name in pictures)
    texts = {f"policy_{name}.csv": _csv(frame) for name, frame in tables.items()} | {
        "policies.md": markdown(title, warning, blocks, [])
        + links
        + "".join(f"- {note}\n" for note in notes),
        "policies.tex": latex(title, warning, blocks, notes),
        # The notes are the page's only list; the pictures come before them.
        "policies.html": html(title, warning, blocks, notes).replace("<ul>", f"{shown}<ul>", 1),
    }
    for name, text in texts.items():
        write_text(out / name, text)
    return [*(out / name for name in texts), *written]


def correlations(buckets: pd.DataFrame) -> dict[tuple[str, str], RankCorrelation]:
    """D against V by side and level, from `bucket_frame`s."""
    return {
        (side, level): rank_correlation(
            rows["distortion"].tolist(), rows["v_pp"].tolist(), rows["bucket"].tolist()
        )
        for (side, level), rows in buckets.groupby(["side", "level"], sort=False)
    }


def _figures(
    tables: Mapping[str, pd.DataFrame],
    policy: Policy,
    found: Mapping[tuple[str, str], RankCorrelation],
    out: Path,
    about: str,
) -> list[Path]:
    groups = policy.decode.evidence.groups
    written = heat_map(tables["buckets"], groups, out, about, "policy_buckets")
    written += mismatch_figure(tables["buckets"], found, out, about, "policy_mismatch")
    if not tables["candidates"].empty:
        alpha = {side.evidence.side: 100 * side.alpha for side in sides_of(policy)}
        frames = tables["candidates"], tables["frontier"]
        written += cost_figure(*frames, alpha, out, about, "policy_cost")
    return written


def _together(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One below the other; a side without candidates has no rows and no types."""
    filled = [frame for frame in frames if not frame.empty]
    return pd.concat(filled, ignore_index=True) if filled else frames[0]


def _correlation_frame(found: Mapping[tuple[str, str], RankCorrelation]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "side": side,
                "level": level,
                "rho": one.rho,
                "rho_low": one.low,
                "rho_high": one.high,
                "p": one.p,
                "n": one.n,
                "names": one.names,
                "draws": one.draws,
            }
            for (side, level), one in found.items()
        ]
    )


def _csv(frame: pd.DataFrame) -> str:
    """Ten significant digits, gaps empty."""
    return str(frame.to_csv(index=False, lineterminator="\n", float_format="%.10g"))


def _picture(path: Path) -> str:
    """Inside the page, so that it needs no other file."""
    data = b64encode(path.read_bytes()).decode()
    source = f"data:image/svg+xml;base64,{data}"
    return f'<p><img alt="{path.stem}" style="max-width:100%" src="{source}"></p>\n'
