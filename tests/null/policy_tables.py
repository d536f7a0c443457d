"""Small tables of evidence, written by hand or drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from pask.methods.levels import Level
from pask.policy.actions import Ladder
from pask.policy.evidence import BucketEvidence, Evidence, Failures
from pask.policy.floors import Thresholds, floors
from pask.policy.path import greedy_path, round_robin_path
from pask.policy.policy import SidePolicy
from pask.structure.buckets import LayerBucket

R, L2, L4, L8, H = Level.RELEASE, Level.LOW2, Level.LOW4, Level.LOW8, Level.HIGH
PAPER = Ladder((R, L4, H))
ROWS = 200


def found(
    name: str,
    group: int,
    distortion: Mapping[Level, float],
    lost: Mapping[Level, int] | None = None,
    tokens: float = 1.0,
) -> BucketEvidence:
    """A bucket's evidence; of 200 rows `lost` are lost, none where it says nothing."""
    lost = lost or {}
    failures = {a: Failures(ROWS, lost.get(a, 0), 0, ROWS) for a in distortion if a is not H}
    return BucketEvidence(LayerBucket(name, group), tokens, {**distortion, H: 0.0}, failures, 9)


def evidence(
    *buckets: BucketEvidence, groups: Sequence[int] = (1,), ladder: Ladder = PAPER
) -> Evidence:
    return Evidence("decode", ladder, tuple(groups), ROWS, buckets)


def packed(
    of: Evidence,
    tau: Thresholds,
    steps: int,
    ranking: str = "distortion",
) -> SidePolicy:
    least = floors(of, tau)
    path = (greedy_path if ranking == "distortion" else round_robin_path)(of, least)
    return SidePolicy(of, tau, ranking, least, path, min(steps, len(path)), (), 0.05)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    """Whole distortions, so that ties are frequent and an oracle can be exact."""
    ladder = draw(st.sampled_from([PAPER, Ladder((R, H)), Ladder((R, L2, L4, L8, H))]))
    groups = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    buckets = []
    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True)):
        for group in range(len(groups)):
            distortion = {a: draw(st.integers(0, 12)) for a in ladder.actions[:-1]}
            lost = {a: draw(st.integers(0, 6)) for a in ladder.actions[:-1]}
            buckets.append(found(name, group, distortion, lost, draw(st.integers(1, 5))))
    return evidence(*buckets, groups=groups, ladder=ladder)


def taus() -> st.SearchStrategy[Thresholds]:
    """Around one lost row of 200, 0.005, and at it."""
    return st.sampled_from([(0.0, 0.0), (0.005, 0.01), (0.005, 0.02), (1.0, 1.0)]).map(
        lambda pair: Thresholds(*pair)
    )
