"""What a workload is given of the process that it runs in."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .device import Device
from .group import Group
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
    until: float = math.inf
    """When the plan's deadline ends this process, on the monotonic clock: before it, what is known can be told."""

    @property
    def left_s(self) -> float:
        """Seconds until then."""
        return self.until - time.monotonic()

    @property
    def group(self) -> Group:
        """The ranks that run the case."""
        return self.device.group

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Everything inside belongs to this stage: prepare, build, verify, warm up, sample, summarize. All ranks
        begin and end it together.
        """
        with self.stages.stage(name), self.group.together():
            yield
