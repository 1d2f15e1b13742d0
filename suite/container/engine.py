"""Finding the Docker engine, and saying exactly what is wrong where there is none."""

from __future__ import annotations

import os
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...registry.errors import InputError
from .errors import DiskFull, EngineDown, LaunchError, NoDocker, NoPermission

if TYPE_CHECKING:
    from docker import DockerClient

TIMEOUT_S = 60
FULL = re.compile(r"no space left on device|don't have enough free space|disk quota exceeded", re.IGNORECASE)
"""How engines, builders and apt say that a disk is full."""


@dataclass(frozen=True)
class Engine:
    """An engine that answered."""

    client: DockerClient
    address: str

    @property
    def local(self) -> bool:
        """Whether the engine is on this machine, so that its driver is ours."""
        return self.address.startswith("unix://")

    @property
    def storage(self) -> str:
        """The folder in which it keeps images and volumes."""
        return str(self.client.info().get("DockerRootDir", "its data directory"))

    def explain(self, error: Exception, doing: str) -> LaunchError:
        """The error of a call to this engine, in our words."""
        text = str(getattr(error, "explanation", None) or error)
        if FULL.search(text):
            return DiskFull(self.storage, doing)
        return LaunchError(f"the Docker engine at {self.address} refused while {doing}: {text}")


def find() -> Engine:
    """The engine of DOCKER_HOST, else of Docker's current context, else of a socket in its usual place.

    Raises `LaunchError` that says what was looked at.
    """
    try:
        import docker
    except ImportError:
        raise InputError("the Docker SDK for Python is not installed: pip install 'kernelmark[images]'") from None
    addresses = candidates()
    there = [x for x in addresses if not x.startswith("unix://") or Path(_path(x)).exists()]
    if not there:
        looked_at = ", ".join(addresses)
        if os.environ.get("DOCKER_HOST") or shutil.which("docker") or shutil.which("dockerd"):
            raise EngineDown(looked_at, "there is no such socket")
        raise NoDocker(looked_at)
    address = there[0]
    if address.startswith("unix://"):
        _connect(address)
    try:
        if os.environ.get("DOCKER_HOST"):
            client = docker.from_env(timeout=TIMEOUT_S)  # which reads DOCKER_TLS_VERIFY and DOCKER_CERT_PATH too
        else:
            client = docker.DockerClient(base_url=address, timeout=TIMEOUT_S)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise EngineDown(address, str(error)) from None
    return Engine(client, address)


def candidates() -> list[str]:
    """Addresses at which an engine may be, the user's own choice first and then alone."""
    if host := os.environ.get("DOCKER_HOST"):
        return [host]
    found = []
    if (context := _context()) is not None:
        found.append(context)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    sockets = [
        Path("/var/run/docker.sock"),
        *([Path(runtime) / "docker.sock"] if runtime else []),  # rootless
        Path.home() / ".docker" / "run" / "docker.sock",  # Docker Desktop
    ]
    found += [f"unix://{x}" for x in sockets]
    return list(dict.fromkeys(found))


def _context() -> str | None:
    """The address of the current context that `docker context use` chose; None for the default one."""
    from docker.context import ContextAPI
    from docker.errors import DockerException

    try:
        context = ContextAPI.get_current_context()
    except (DockerException, OSError, ValueError):  # a broken file of contexts is the docker command's to explain
        return None
    if context is None or context.Name == "default":
        return None
    host = context.Host
    return str(host) if host else None


def _path(address: str) -> str:
    return address.removeprefix("unix://")


def _connect(address: str) -> None:
    """Asks the socket itself: the SDK wraps the reason four exceptions deep."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(TIMEOUT_S)
        try:
            probe.connect(_path(address))
        except PermissionError:
            raise NoPermission(address) from None
        except OSError as error:
            raise EngineDown(address, error.strerror or str(error)) from None
