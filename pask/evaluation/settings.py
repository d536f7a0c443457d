"""The methods of a run as they are evaluated: calibrated fields and searched knobs filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pask.config import Entry, RunConfig
from pask.evaluation import budget
from pask.methods.contract import Method
from pask.methods.registry import make_method, method_class


@dataclass(frozen=True)
class Settings:
    """By entry name: its method, or why its budget cannot be reached; `reached`: the B_persist on
    development rows at which the search of its knob ended, where there was a search."""

    methods: dict[str, Method] = field(default_factory=dict)
    not_reachable: dict[str, str] = field(default_factory=dict)
    reached: dict[str, float] = field(default_factory=dict)


def settings_of(
    config: RunConfig, model_digest: str, entries: Sequence[Entry] | None = None
) -> Settings:
    """The entries' methods for a model; PaskError where a calibration or a search is missing."""
    entries = config.entries if entries is None else entries
    measured = budget.measured_fields(config, model_digest, entries)
    settings = Settings()
    for entry in entries:
        fields = measured.get(entry.family, {})
        nominal = None
        low, high = method_class(entry.method).budgets
        if not low <= entry.budget <= high:
            why = f"{entry.method} holds {low:g} to {high:g}"
            settings.not_reachable[entry.name] = why
            continue
        if config.budget.search and low < high:
            found = budget.read(config, entry, model_digest, fields)
            if found.status == "not reachable":
                settings.not_reachable[entry.name] = found.why
                continue
            nominal = found.nominal
            if found.reached is not None:
                settings.reached[entry.name] = found.reached
        settings.methods[entry.name] = make_method(
            entry.method, entry.budget, entry.params, nominal=nominal, measured=fields
        )
    return settings
