"""Speeds as ratios: both sides measured in one run, on one machine, by one command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module

from pask.config import RunConfig
from pask.errors import PaskError, known_names
from pask.provenance import machine

BENCHES = {  # what `--items` counts, and how many by default
    "attention": ("repetitions", 20),
    "calibrate": ("rows", 4),
    "evaluate": ("rows", 50),
    "kernels": ("repetitions", 50),
    "lockstep": ("tokens", 20_000),
    "methods": ("rows", 16),
    "replay": ("interventions", 100),
    "tags": ("rows", 8),
}
ON_DEVICES = ("kernels",)


@dataclass(frozen=True)
class Measured:
    """Both sides of a benchmark in one unit, over `n` rows or tokens."""

    ours: float
    theirs: float
    unit: str
    n: int
    less_is_better: bool = False

    @property
    def ratio(self) -> float:
        """How many times better ours is."""
        return self.theirs / self.ours if self.less_is_better else self.ours / self.theirs


@dataclass(frozen=True)
class Result:
    """One benchmark's outcome; `ratio` is how many times better ours is than theirs."""

    name: str
    ratio: float
    ours: float
    theirs: float
    unit: str
    n: int
    machine: str


def run(
    name: str, config: RunConfig, items: int | None = None, *, device: str | None = None
) -> dict[str, object]:
    """Run the benchmark `name`; its result as the one JSON line that ends the output.

    Raises PaskError for an unknown name, and for a `device` where only the CPU is measured.
    """
    if name not in BENCHES:
        raise PaskError(f"unknown benchmark {name!r}", todo=known_names(name, BENCHES))
    more = {} if device is None else {"device": device}
    if more and name not in ON_DEVICES:
        raise PaskError(
            f"the benchmark {name!r} measures on the CPU",
            todo=f"--device is for: {', '.join(ON_DEVICES)}",
        )
    measure: Callable[..., Measured] = import_module(f"pask.bench.{name}").measure
    found = measure(config, items or BENCHES[name][1], **more)
    result = Result(
        name=name,
        ratio=round(found.ratio, 2),
        ours=round(found.ours, 2),
        theirs=round(found.theirs, 2),
        unit=found.unit,
        n=found.n,
        machine=machine(),
    )
    return asdict(result)
