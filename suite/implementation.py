"""One way to compute an operator, or one system of a workload: what a catalog lists and a plan chooses from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..registry.store.record import PROVIDER, Case, Status
from . import __version__
from .environments import interpreter, version

Factory = Callable[[Case], Callable[..., Any]]
WORKER_NEEDS = "torch"
"""Without it no worker starts, whatever it is to measure."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator, and where it comes from. Loading it imports its library.

    `root` is the folder of the catalog's root that it was found in.
    """

    operator: str
    name: str
    provider: str
    requires: tuple[str, ...]
    environment: str
    devices: tuple[str, ...]
    load: Callable[[], Factory]
    root: Path | None = None
    no_environment: str = ""
    """Why no command makes its environment, and what to do; empty where one does."""
    once: bool = False
    """Whether a process can have it once only: another case of it takes another process."""
    apart: bool = False
    """Whether it takes another process than those that are not: what they leave in it would make either wrong."""
    on_request: bool = False
    """Whether only cases that name it have it, and runs that ask for it: it is tuned for minutes, say."""
    install: str = ""
    """What to do where its library is missing, if that is not `pip install` of it."""
    assembled: bool = False
    """Whether it is a system of parts, which is asked for by its name: its provider's is that of the plain one."""
    parts_of: tuple[Path | None, ...] = ()
    """Of a system, the roots that its parts come from: what it runs changes with any of them."""

    def held_by(self, folders: Collection[str]) -> bool:
        """Whether one of these roots holds it, or a part of it."""
        return any(str(x) in folders for x in (self.root, *self.parts_of))

    def among(self, names: Collection[str]) -> bool:
        """Whether names of implementations or providers ask for it."""
        return self.name in names or (self.provider in names and not self.assembled)

    @property
    def version(self) -> str | None:
        """The version of the library behind it."""
        if self.provider == PROVIDER:
            return __version__
        return version(self.environment, self.requires[0]) if self.requires else None

    def asked_on(self, device: str) -> bool:
        """Whether a row of it is due on a device. What needs an NVIDIA GPU is asked for elsewhere too and gets its
        `unsupported` row; what is for a CPU alone is not asked for on a GPU, where the kernel itself is.
        """
        return device in self.devices or (device != "cuda" and "cuda" in self.devices)

    def unavailable(self, device: str, here: bool = True) -> tuple[Status, str] | None:
        """None where it can run; else (status, reason): `unsupported` device or `unavailable` library. What is
        installed on another machine than `here` is not known, and not asked.
        """
        if not self.devices:
            return "unsupported", "no device runs all of its parts so"
        if device not in self.devices:
            # AMD's GPUs run what is for CUDA by its names: whoever has neither knows it by that.
            needed = "cuda" if "cuda" in self.devices else " or ".join(self.devices)
            return "unsupported", f"needs a {needed} device, this is {device}"
        if not here:
            return None
        remedy = f"make environment NAME={self.environment}"
        if interpreter(self.environment) is None:
            why = self.no_environment or f"environment {self.environment!r} is not installed: {remedy}"
            return "unavailable", why
        for name in dict.fromkeys((WORKER_NEEDS, *self.requires)):
            if version(self.environment, name) is None:
                if self.environment == "core":
                    how = self.install if name in self.requires else ""
                    return "unavailable", f"{name} is not installed: {how or f'pip install {name}'}"
                return "unavailable", f"{name} is not installed in environment {self.environment!r}: {remedy}"
        return None
