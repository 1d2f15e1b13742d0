"""The environments that both sides of a comparison are measured in, from the command's options."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from ...registry.errors import InputError
from ...registry.store.home import Home
from ..environments import Environment, installed, ours
from ..run.fingerprint import device_named
from .container_options import tell

IMAGE = "image:"
"""Before an image's name in the place of an environment's Python."""


def environments(
    base: str | None, current: str | None, device: str | None, home: Home
) -> tuple[Environment, Environment]:
    """Both sides' environments, each fit to measure. Raises `KernelmarkError`."""
    found = {x: _environment(x, device, home) for x in dict.fromkeys((base, current))}
    return found[base], found[current]


def _environment(named: str | None, device: str | None, home: Home) -> Environment:
    if named is None:
        return ours
    if not named.startswith(IMAGE):
        return installed(Path(named))
    from ..container.interpreter import opened
    from ..container.session import prepare
    from .container_options import from_environment

    wanted = None
    if device_named(device) == "cuda":
        # Here and there are then counted alike, and one GPU is measured on.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        if not wanted.isdigit():
            raise InputError(f"CUDA_VISIBLE_DEVICES={wanted}: with an image, name the GPU by its number.")
    return partial(opened, prepare(named.removeprefix(IMAGE), wanted, home, from_environment(), tell))
