"""Which of a run's entries follow a policy, and what has to be measured for them."""

from __future__ import annotations

from pask.calibration.intervention import Interventions
from pask.config import Entry, RunConfig
from pask.errors import PaskError
from pask.methods.levels import Level
from pask.methods.pask import PASK
from pask.methods.registry import make_method, method_class
from pask.policy.actions import Ladder


def policy_families(config: RunConfig) -> dict[str, Entry]:
    """An entry of each family that follows a policy, by the family's name.

    Entries of one family differ in their budget alone, and a policy knows no budget.
    """
    found: dict[str, Entry] = {}
    for entry in config.entries:
        if issubclass(method_class(entry.method), PASK):
            found.setdefault(entry.family, entry)
    return found


def families_to_make(config: RunConfig) -> dict[str, Entry]:
    """Those of `policy_families` whose policy the run itself makes, not given one's."""
    return {
        family: entry
        for family, entry in policy_families(config).items()
        if not method_without_policy(entry).policy_file
    }


def method_without_policy(entry: Entry) -> PASK:
    """The family's method, without its policy; PaskError for parameters that it refuses."""
    method = make_method(entry.method, None, entry.params)
    assert isinstance(method, PASK)
    return method


def interventions_of(config: RunConfig) -> Interventions:
    """What is measured once for all of the run's policies: every level that one of them uses.

    PaskError where the run makes no policy, and where two differ in `recent` or `sinks`, which
    decide what an intervention does.
    """
    methods = {
        family: method_without_policy(entry) for family, entry in families_to_make(config).items()
    }
    if not methods:
        raise PaskError(
            "this run makes no policy",
            where=f"run {config.run}",
            todo="list pask among the methods, without policy_file",
        )
    first, *others = methods.values()
    for what in ("recent", "sinks"):
        values = {family: getattr(method, what) for family, method in methods.items()}
        if len(set(values.values())) > 1:
            raise PaskError(
                f"{what} differs: " + ", ".join(f"{f} has {v}" for f, v in values.items()),
                where="methods",
                todo="give all variants of pask the same, or each a run of its own",
            )
    levels: set[Level] = set()
    for method in (first, *others):
        levels.update(method.ladder.actions)
    return Interventions(first.recent, Ladder(tuple(sorted(levels))), first.sinks)
