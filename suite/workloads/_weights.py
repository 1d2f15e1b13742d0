"""Trained weights on disk: small checkpoints that are made by a command in minutes and never committed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...registry.store.home import Home
from ..measure.verify import Unavailable
from ._checkpoint import Checkpoint

VARIABLE = "KERNELMARK_CHECKPOINTS"


def path(model: str, data: str, steps: int) -> Path:
    """Where they lie: below $KERNELMARK_CHECKPOINTS, by default below the home."""
    given = os.environ.get(VARIABLE)
    folder = Path(given) if given else Home().folder / "checkpoints"
    return folder / f"{model}-{data}-{steps}.pt"


def save(model: str, data: str, steps: int, weights: Mapping[str, Any]) -> Path:
    """Writes weights by name."""
    target = path(model, data, steps)
    Checkpoint(target).save({name: x.detach().cpu() for name, x in weights.items()})
    return target


def load(model: str, data: str, steps: int) -> dict[str, Any]:
    """Weights by name, on the host. Raises `Unavailable` where they have not been made."""
    found = Checkpoint(path(model, data, steps)).load("cpu")
    if found is None:
        raise Unavailable(
            f"data: no checkpoint here. Make it with: kernelmark checkpoint {model} --data {data} --steps {steps}"
        )
    return found
