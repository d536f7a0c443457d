"""The policy Lambda and Gamma: what Algorithm 1 returns, with everything that led there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from math import floor
from pathlib import Path
from typing import Any

from pask.digests import digest
from pask.errors import PaskError
from pask.files import write_json
from pask.methods.levels import Level
from pask.policy.actions import level_named, short
from pask.policy.evidence import Evidence, Failures
from pask.policy.floors import Thresholds, floors
from pask.policy.path import (
    RANKINGS,
    Upgrade,
    candidate,
    check_path,
    cost,
    path_below,
    ranked_path,
)
from pask.structure.buckets import LayerBucket

SCHEMA = 2

_TODO = "run pask policy make (or snakemake)"


def gate_items(alpha: float, rows: int) -> int:
    """How many more of `rows` than the reference a candidate may fail: floor(alpha rows), where
    alpha is a proportion and a product that is whole but for its rounding is whole."""
    return floor((alpha + 1e-9) * rows)


@dataclass(frozen=True)
class Scanned:
    """One candidate as the development rows saw it; `tau` is None without floors."""

    tau: Thresholds | None
    steps: int  # upgrades of its path
    cost: float  # the side's C_KV on Full KV's answers to these rows
    rows: int
    reference_failures: int
    lost: int  # right under the reference, wrong under the candidate
    gained: int  # the other way round

    @property
    def failures(self) -> int:
        return self.reference_failures + self.lost - self.gained

    @property
    def increase(self) -> float:
        """The failure rate above the reference's, as a proportion: what alpha bounds."""
        return (self.lost - self.gained) / self.rows

    def interval(self) -> tuple[float, float]:
        """95 % score interval of the increase, of paired rows (`Failures.interval`)."""
        return Failures(self.rows, self.lost, self.gained, self.rows).interval()

    def within(self, alpha: float) -> bool:
        """The inclusive gate of Equation 8."""
        return self.lost - self.gained <= gate_items(alpha, self.rows)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Scanned:
        return cls(**{**value, "tau": _tau(value["tau"])})


@dataclass(frozen=True)
class SidePolicy:
    """One side, packed: floors, upgrade scores and how many upgrades were selected.

    ValueError for floors of other buckets than the evidence's, for a path that does not lead from
    them to HIGH, and for steps that it does not have.
    """

    evidence: Evidence
    tau: Thresholds | None  # None: no floors, the ablation without V
    ranking: str  # one of `pask.policy.path.RANKINGS`
    floors: Mapping[LayerBucket, Level]
    path: tuple[Upgrade, ...]
    steps: int  # the selected candidate is path[:steps]
    candidates: tuple[Scanned, ...]
    alpha: float  # tolerated increase of the failure rate on development rows, as a proportion

    def __post_init__(self) -> None:
        if self.ranking not in RANKINGS:
            raise ValueError(f"policy: unknown ranking {self.ranking!r}")
        if set(self.floors) != {found.bucket for found in self.evidence.buckets}:
            raise ValueError("policy: the floors are not of the evidence's buckets")
        check_path(self.evidence.ladder, self.floors, self.path)
        if not 0 <= self.steps <= len(self.path):
            raise ValueError(f"policy: {self.steps} of {len(self.path)} steps are selected")

    @cached_property
    def table(self) -> Mapping[LayerBucket, Level]:
        """a0: the selected level of every bucket."""
        return candidate(self.floors, self.path, self.steps)

    @cached_property
    def below(self) -> tuple[Upgrade, ...]:
        """From everything released up to the floors (`pask.policy.path.path_below`)."""
        return path_below(self.evidence, self.floors, self.tau, self.ranking)

    @cached_property
    def mending(self) -> tuple[Upgrade, ...]:
        """From the floors on in the order of `below` until nothing is left that did harm.

        Thresholds that are tolerable leave buckets low that did some harm; what a budget has left
        is theirs first. Nothing without thresholds.
        """
        if self.tau is None:
            return ()
        whole = path_below(self.evidence, self._harmless, self.tau, self.ranking)
        return whole[len(self.below) :]

    @cached_property
    def above(self) -> tuple[Upgrade, ...]:
        """From the floors to everything at HIGH where a budget and no tolerance decides: `mending`,
        and then by D. Without thresholds it is `path`."""
        if self.tau is None:
            return self.path
        return *self.mending, *ranked_path(self.evidence, self._harmless, self.ranking)

    @property
    def _harmless(self) -> Mapping[LayerBucket, Level]:
        """The floors of thresholds that allow no harm."""
        return floors(self.evidence, Thresholds(0.0, 0.0))

    @property
    def cost(self) -> float:
        """C_KV that the calibration rows expect of the selected levels."""
        return cost(self.evidence, self.table)

    def to_json(self) -> dict[str, Any]:
        return {
            "evidence": self.evidence.to_json(),
            "tau": None if self.tau is None else asdict(self.tau),
            "ranking": self.ranking,
            "floors": [
                {"name": q.name, "group": q.group, "level": short(level)}
                for q, level in self.floors.items()
            ],
            "path": [step.to_json() for step in self.path],
            "steps": self.steps,
            "candidates": [seen.to_json() for seen in self.candidates],
            "alpha": self.alpha,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SidePolicy:
        return cls(
            Evidence.from_json(value["evidence"]),
            _tau(value["tau"]),
            value["ranking"],
            {LayerBucket(q["name"], q["group"]): level_named(q["level"]) for q in value["floors"]},
            tuple(Upgrade.from_json(step) for step in value["path"]),
            value["steps"],
            tuple(Scanned.from_json(seen) for seen in value["candidates"]),
            value["alpha"],
        )


def _tau(value: Mapping[str, float] | None) -> Thresholds | None:
    return None if value is None else Thresholds(**value)


@dataclass(frozen=True)
class Policy:
    """Everything that decides a request's levels.

    `made_for` says by name what it was calibrated for (digests of model and tokenizer, grammar,
    prompt style, data, ...) and `calibration` what was counted on the way; both are JSON.
    ValueError for sides whose groups are not `layer_groups`.
    """

    made_for: Mapping[str, str]
    layers: int
    layer_groups: tuple[int, ...]  # the first layer of each group
    coarsening: str
    recent: int  # latest decoded tokens that stay at HIGH
    beta: float  # the quantile of `reserve`
    decode: SidePolicy
    prompt: SidePolicy | None  # None: the prompt stays whole
    reserve: Mapping[str, float]  # Gamma by bucket name, in tokens at HIGH in all layers
    margin: float  # the same quantile of a calibration answer's length, over the mean length
    calibration: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for side, name in ((self.decode, "decode"), (self.prompt, "prompt")):
            if side is None:
                continue
            if side.evidence.side != name:
                raise ValueError(f"policy: its {name} side has evidence of the other one")
            starts = (0, *accumulate(side.evidence.groups))
            if starts != (*self.layer_groups, self.layers):
                raise ValueError(f"policy: the {name} side has other layer groups")

    @property
    def digest(self) -> str:
        """Hex sha256 over the whole content."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "made_for": dict(self.made_for),
            "layers": self.layers,
            "layer_groups": list(self.layer_groups),
            "coarsening": self.coarsening,
            "recent": self.recent,
            "beta": self.beta,
            "decode": self.decode.to_json(),
            "prompt": None if self.prompt is None else self.prompt.to_json(),
            "reserve": dict(self.reserve),
            "margin": self.margin,
            "calibration": dict(self.calibration),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Policy:
        prompt = value["prompt"]
        return cls(
            dict(value["made_for"]),
            value["layers"],
            tuple(value["layer_groups"]),
            value["coarsening"],
            value["recent"],
            value["beta"],
            SidePolicy.from_json(value["decode"]),
            None if prompt is None else SidePolicy.from_json(prompt),
            dict(value["reserve"]),
            value["margin"],
            dict(value["calibration"]),
            value["schema"],
        )


def write_policy(path: Path, policy: Policy) -> None:
    """Write the policy as readable JSON with its digest, whole or not at all."""
    write_json(path, {**policy.to_json(), "digest": policy.digest})


def read_policy(path: Path) -> Policy:
    """The policy of a file.

    PaskError for one that is missing, cut off, of another schema, changed since it was written, or
    no policy.
    """
    where = str(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "schema" not in found or "digest" not in found:
            raise ValueError("a policy has a schema and a digest")
    except FileNotFoundError:
        raise PaskError("there is no such policy", where=where, todo=_TODO) from None
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise PaskError("the policy cannot be read", where=where, why=why) from error
    except ValueError as error:
        what = "the file holds no whole policy"
        raise PaskError(what, where=where, why=str(error), todo=_TODO) from error
    if found["schema"] != SCHEMA:
        what = f"the policy has schema {found['schema']!r}, this version reads {SCHEMA}"
        raise PaskError(what, where=where, todo=_TODO)
    written = found.pop("digest")
    try:
        if digest(found) != written:
            why = "its content no longer has the digest that was written with it"
            raise PaskError("the policy was changed", where=where, why=why, todo=_TODO)
        return Policy.from_json(found)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"
        raise PaskError("the policy is damaged", where=where, why=why, todo=_TODO) from error


def check_made_for(policy: Policy, wanted: Mapping[str, str], where: str) -> None:
    """PaskError naming every difference between what the policy was made for and `wanted`.

    What `wanted` does not mention may be anything.
    """
    made = policy.made_for
    differ = [
        f"{name} {_brief(made.get(name))}, not {_brief(value)}"
        for name, value in sorted(wanted.items())
        if made.get(name) != value
    ]
    if differ:
        what = f"the policy was made for another {'; '.join(differ)}"
        raise PaskError(what, where=where, todo="give the run's own policy, or calibrate for it")


def _brief(value: str | None) -> str:
    """A text short enough for one line; the first 16 digits of a digest."""
    if value is None:
        return "unknown"
    return value[:16] if len(value) == 64 else value
