"""A policy that nobody measured: enough to time PASK by, in a benchmark that calibrates nothing."""

from __future__ import annotations

from collections.abc import Sequence

from pask.config import RunConfig
from pask.methods.levels import Level
from pask.methods.pask import PASK
from pask.policy.evidence import SIDES, BucketEvidence, Evidence, Failures
from pask.policy.floors import no_floors
from pask.policy.path import greedy_path
from pask.policy.policy import Policy, SidePolicy
from pask.structure.buckets import LayerBucket, all_buckets, layer_groups
from pask.structure.labels import Label

_TOKENS = {"decode": 2.0, "prompt": 40.0}  # of a bucket, a row


def made_up_policy(method: PASK, config: RunConfig, layers: int) -> Policy:
    """For `method` on a model of so many layers: every bucket that there can be, no floors, half of
    each side's upgrades selected. D halves from one bucket to the next, and with each level."""
    wanted = config.structure.layer_groups
    groups = layer_groups(layers, min(wanted, layers) if isinstance(wanted, int) else wanted)
    coarsening = config.structure.coarsening
    names = dict(
        zip(SIDES, (all_buckets(coarsening), [label.value for label in Label]), strict=True)
    )
    decode, prompt = (_side(method, side, names[side], tuple(map(len, groups))) for side in SIDES)
    return Policy(
        made_for={},
        layers=layers,
        layer_groups=tuple(group.start for group in groups),
        coarsening=coarsening,
        recent=method.recent,
        beta=method.beta,
        decode=decode,
        prompt=prompt,
        reserve=dict.fromkeys(names["decode"], 0.0),
        margin=1.0,
    )


def _side(method: PASK, side: str, names: Sequence[str], groups: tuple[int, ...]) -> SidePolicy:
    *low, _ = method.ladder.actions
    buckets = [LayerBucket(name, group) for name in names for group in range(len(groups))]
    evidence = Evidence(
        side,
        method.ladder,
        groups,
        rows=1,
        buckets=tuple(
            BucketEvidence(
                bucket,
                _TOKENS[side],
                {level: 2.0 ** -(number % 20 + int(level)) for level in low} | {Level.HIGH: 0.0},
                {level: Failures(1, 0, 0, 1) for level in low},
                positions=1,
            )
            for number, bucket in enumerate(buckets)
        ),
    )
    floors = no_floors(evidence)
    path = greedy_path(evidence, floors)
    return SidePolicy(evidence, None, "distortion", floors, path, len(path) // 2, (), 0.0)
