"""The evidence of a run's calibration rows, for the ladder of each policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pask.calibration.families import interventions_of
from pask.calibration.gather import gather
from pask.calibration.row_files import Line
from pask.calibration.rows import read_evidence
from pask.config import RunConfig
from pask.methods.pask import PASK
from pask.policy.evidence import Evidence
from pask.structure.buckets import layer_groups


@dataclass(frozen=True)
class Measured:
    """The calibration rows' lines; `groups`: layers in each group of the model."""

    lines: Sequence[Line]
    groups: tuple[int, ...]
    coarsening: str
    model_digest: str

    def sides(self, method: PASK) -> tuple[Evidence, Evidence]:
        """Decode and prompt side, as the method reads them; the lines may have further levels."""
        return gather(
            self.lines,
            ladder=method.ladder,
            groups=self.groups,
            coarsening=self.coarsening,
            distortion=method.distortion,
            positions=method.positions,
        )


def measured_evidence(config: RunConfig, model_digest: str, layers: int) -> Measured:
    """What was measured on the run's calibration rows, of a model of so many layers; PaskError
    where it was not."""
    lines = read_evidence(
        config, interventions_of(config), model_digest, shards=config.engine.shards
    )
    groups = layer_groups(layers, config.structure.layer_groups)
    return Measured(lines, tuple(map(len, groups)), config.structure.coarsening, model_digest)
