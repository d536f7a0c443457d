"""Equation 8: of all candidates tried on development rows the cheapest one within the tolerance.

And what is packed with it: floors, path and evidence of both sides, the reserve of Equation 9, and
what every candidate did on the development rows. The result is the policy file, frozen from then
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import fsum
from pathlib import Path
from statistics import fmean

from pask.calibration.evidence import Measured, measured_evidence
from pask.calibration.families import families_to_make, method_without_policy
from pask.calibration.policies import made_for, policy_file
from pask.calibration.row_files import Line
from pask.calibration.scan import files as scan_files
from pask.calibration.trials import Nested, nested_families, table_key
from pask.config import Entry, RunConfig
from pask.errors import HarnessFault, PaskError
from pask.evaluation.model import load_files
from pask.methods.pask import PASK
from pask.policy.evidence import Evidence
from pask.policy.policy import (
    Policy,
    Scanned,
    SidePolicy,
    write_policy,
)
from pask.policy.reserve import quantile, reserve


def make_policies(config: RunConfig, methods: Sequence[str] | None = None) -> list[Path]:
    """Select and write the policies of the run's families (or those of `methods`).

    PaskError where rows of calibration or development are not measured, or for something else.
    """
    model = load_files(config)
    measured = measured_evidence(config, model.digest, model.layout.layers)
    lines = scan_files(config, measured).read(config.engine.shards)
    chosen = {entry.family for entry in config.select(methods)}
    written = []
    for family, entry in families_to_make(config).items():
        if family not in chosen:
            continue
        policy = make_policy(config, entry, measured, lines)
        path = policy_file(config, family)
        write_policy(path, policy)
        written.append(path)
    return written


def make_policy(
    config: RunConfig, entry: Entry, measured: Measured, lines: Sequence[Line]
) -> Policy:
    """A family's policy, from the lines of calibration and of the scan."""
    method = method_without_policy(entry)
    sides = {}
    for evidence, alpha in zip(
        measured.sides(method), (method.alpha_decode, method.alpha_prefill), strict=True
    ):
        if evidence.side in method.sides:
            sides[evidence.side] = select(method, evidence, alpha, lines)
    decode = sides["decode"]
    lengths = [len(line["names"]) for line in measured.lines]
    return Policy(
        made_for=made_for(config, entry, measured.model_digest),
        layers=sum(measured.groups),
        layer_groups=(0, *list(accumulate(measured.groups))[:-1]),
        coarsening=config.structure.coarsening,
        recent=method.recent,
        beta=method.beta,
        decode=decode,
        prompt=sides.get("prompt"),
        reserve=reserve(
            [line["names"] for line in measured.lines], decode.floors, measured.groups, method.beta
        ),
        margin=quantile(lengths, method.beta) / fmean(lengths),
        calibration={
            "distortion": method.distortion,
            "positions": method.positions,
            "rows": len(measured.lines),
            "right_under_full_kv": sum(line["reference_correct"] for line in measured.lines),
            "answer_tokens": sum(line["fed"] for line in measured.lines),
            "prompt_tokens": sum(line["prompt_tokens"] for line in measured.lines),
            "development_rows": len(lines),
            "development_right_under_full_kv": sum(line["reference_correct"] for line in lines),
        },
    )


def select(method: PASK, evidence: Evidence, alpha: float, lines: Sequence[Line]) -> SidePolicy:
    """One side's cheapest candidate within `alpha`, of all pairs of thresholds together.

    Cost is C_KV on Full KV's answers to the development rows. Of equal costs the one with fewer
    failures, then the earlier pair of thresholds, then fewer upgrades. The candidate with
    everything at HIGH is always within the tolerance.
    """
    families = nested_families(method, evidence)
    seen = [
        (family, scanned(family, steps, lines)) for family in families for steps in family.tried
    ]
    within = [
        (found.cost, found.failures, families.index(family), found.steps)
        for family, found in seen
        if found.within(alpha)
    ]
    if not within:
        raise HarnessFault(f"no candidate of the {evidence.side} side is within {alpha:g}")
    _, _, number, steps = min(within)
    chosen = families[number]
    return SidePolicy(
        evidence=evidence,
        tau=chosen.tau,
        ranking=method.ranking,
        floors=dict(chosen.floors),
        path=chosen.path,
        steps=steps,
        candidates=tuple(found for _, found in seen),
        alpha=alpha,
    )


def scanned(family: Nested, steps: int, lines: Sequence[Line]) -> Scanned:
    """What the development rows say of a candidate; HarnessFault where one was not tried."""
    key = table_key(family.evidence.side, family.table(steps))
    try:
        results = [line["results"][key] for line in lines]
    except KeyError as error:
        raise HarnessFault(f"candidate {key} was not tried on all rows") from error
    if not results:
        raise PaskError("no development rows", todo="raise data.dev_sample")
    pairs = [
        (line["reference_correct"], result) for line, result in zip(lines, results, strict=True)
    ]
    return Scanned(
        tau=family.tau,
        steps=steps,
        cost=fsum(r["cost"] for r in results) / sum(r["tokens"] for r in results),
        rows=len(lines),
        reference_failures=sum(not line["reference_correct"] for line in lines),
        lost=sum(right and not result["correct"] for right, result in pairs),
        gained=sum(result["correct"] and not right for right, result in pairs),
    )
