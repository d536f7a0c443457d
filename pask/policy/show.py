"""A policy as text: what was selected, and every bucket with its floor, action, V and D."""

from __future__ import annotations

from collections.abc import Iterator

from pask.policy.actions import short
from pask.policy.evidence import Failures
from pask.policy.floors import Thresholds
from pask.policy.policy import Policy, Scanned, SidePolicy


def policy_text(policy: Policy) -> str:
    """For a terminal, no line wider than the longest bucket asks for."""
    return "\n".join(_lines(policy))


def _lines(policy: Policy) -> Iterator[str]:
    yield f"policy {policy.digest[:16]}, schema {policy.schema}"
    for name, value in policy.made_for.items():
        yield f"  {name}: {value[:16] if len(value) == 64 else value}"
    yield f"  recent: {policy.recent} decoded tokens stay at H; beta {policy.beta:g}"
    for name, value in policy.calibration.items():
        yield f"  {name.replace('_', ' ')}: {value}"
    for side in (policy.decode, policy.prompt):
        if side is not None:
            yield ""
            yield from _side(side)
    yield ""
    yield "reserve Gamma(s), in tokens at H"
    for name, tokens in policy.reserve.items():
        yield f"  {name:44}{tokens:8.2f}"


def _side(side: SidePolicy) -> Iterator[str]:
    evidence = side.evidence
    groups = ", ".join(map(str, evidence.groups))
    yield f"{evidence.side} side, levels {evidence.ladder}, groups of {groups} layers"
    yield (
        f"  {side.steps} of {len(side.path)} upgrades, expected C_KV {side.cost:.4f}, thresholds "
        f"{_percent(side.tau)}, ranking {side.ranking}, alpha {100 * side.alpha:g} %"
    )
    chosen = next((c for c in side.candidates if (c.tau, c.steps) == (side.tau, side.steps)), None)
    if chosen is not None:
        yield f"  on {chosen.rows} development rows: {_outcome(chosen)}"
    yield f"  {len(side.candidates)} candidates tried"
    low = [level for level, _ in evidence.ladder.upgrades]
    columns = "".join(f"{'V(' + short(level) + ')':>18}" for level in reversed(low))
    columns += "".join(f"{'D(' + short(level) + ')':>11}" for level in reversed(low))
    yield f"  {'bucket':44}{'tokens':>8}{'floor':>7}{'action':>8}{columns}"
    for found in evidence.buckets:
        v = "".join(f"{_failures(found.failures[level]):>18}" for level in reversed(low))
        d = "".join(f"{found.distortion[level]:11.3g}" for level in reversed(low))
        name = f"{found.bucket.name} | {found.bucket.group}"
        floor, action = side.floors[found.bucket], side.table[found.bucket]
        yield f"  {name:44}{found.tokens:8.2f}{short(floor):>7}{short(action):>8}{v}{d}"


def _failures(found: Failures) -> str:
    return f"{100 * found.v:+.1f} % ({found.lost}-{found.gained})"


def _outcome(found: Scanned) -> str:
    return (
        f"C_KV {found.cost:.4f}, {found.failures} failures, {found.reference_failures} under Full "
        f"KV ({100 * found.increase:+.1f} points: {found.lost} lost, {found.gained} gained)"
    )


def _percent(tau: Thresholds | None) -> str:
    return "none" if tau is None else f"{100 * tau.low:g} % and {100 * tau.high:g} %"
