"""What a workload is given of the process that it runs in."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from .device import Device
from .stages import Stages
from .stopping import Sampling


@dataclass(frozen=True)
class Session:
    """One system of one case in one process. `seed` is the case's: one for all systems, fresh by replicate."""

    device: Device
    seed: int
    replicate: int
    sampling: Sampling
    stages: Stages
    scratch: Path | None = None
    """A folder of the run's own, for what goes on after the process was killed; None where nothing is kept."""

    def stage(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Everything inside belongs to this stage: prepare, build, verify, warm up, sample, summarize."""
        return self.stages.stage(name)
