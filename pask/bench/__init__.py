"""Speeds as ratios: both sides measured in one run, on one machine, by one command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module

from pask.config import RunConfig
from pask.errors import PaskError
from pask.provenance import machine

BENCHES = ("evaluate",)


@dataclass(frozen=True)
class Result:
    """`ratio` = ours / theirs (or the inverse where less is better, as `unit` says)."""

    name: str
    ratio: float
    ours: float
    theirs: float
    unit: str
    n: int
    machine: str


def run(name: str, config: RunConfig, items: int) -> dict[str, object]:
    """Run the benchmark `name`; its result as the one JSON line that ends the output.

    Raises PaskError for an unknown name.
    """
    if name not in BENCHES:
        raise PaskError(f"unknown benchmark {name!r}", todo=f"known: {', '.join(BENCHES)}")
    measure: Callable[[RunConfig, int], tuple[float, float, str, int]]
    measure = import_module(f"pask.bench.{name}").measure
    ours, theirs, unit, n = measure(config, items)
    result = Result(
        name, round(ours / theirs, 2), round(ours, 2), round(theirs, 2), unit, n, machine()
    )
    return asdict(result)
