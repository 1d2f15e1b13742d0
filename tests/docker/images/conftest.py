"""A real Docker engine, a base to build on, and the cpu image, once a session.

Everything is done through the command line, as a user would.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
import pytest

from ..engines import HOUSE, PASSWORD, OwnEngine, any_engine, registry_answers, stand_in, wheel_index

KERNELMARK = Path(sys.executable).with_name("kernelmark")
CACHE = HOUSE / "build" / "images"
STAND_IN = "kernelmark-stand-in:bookworm"
LOCKS = ("requirements/image-cpu.txt", "requirements/torch-cpu.txt")


@dataclass(frozen=True)
class Machine:
    """An engine and the environment in which a user's command line talks to it."""

    client: docker.DockerClient
    environment: Mapping[str, str]

    def with_home(self, home: Path) -> Machine:
        return replace(self, environment={**self.environment, "KERNELMARK_HOME": str(home)})

    def kernelmark(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(KERNELMARK), *arguments],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
            cwd=HOUSE,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(KERNELMARK), *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=HOUSE,
            start_new_session=True,
            # What runs the tests in the background may have it ignored, and children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def containers(self) -> list[Any]:
        """The containers of this home, running or not."""
        return list(self.client.containers.list(all=True, filters={"label": self._owner}))

    def left(self) -> list[str]:
        """Names of this home's containers and volumes that still exist."""
        volumes = self.client.volumes.list(filters={"label": self._owner})
        return [str(x.name) for x in (*self.containers(), *volumes)]

    @property
    def _owner(self) -> str:
        home = Path(self.environment["KERNELMARK_HOME"]).resolve()
        return f"io.kernelmark.owner={hashlib.sha256(str(home).encode()).hexdigest()[:16]}"


@pytest.fixture(scope="session")
def engine() -> Iterator[tuple[docker.DockerClient, str]]:
    """An engine's client and address."""
    with any_engine(CACHE / "engine") as found:
        yield found


@pytest.fixture(scope="session")
def wheels() -> Iterator[str]:
    """The address of an index that has all locked packages."""
    with wheel_index(CACHE / "wheels", LOCKS) as address:
        yield address


@pytest.fixture(scope="session")
def machine(engine, wheels, tmp_path_factory) -> Machine:
    """The engine with a base in it, and all that a build needs."""
    client, address = engine
    folder = tmp_path_factory.mktemp("machine")
    pip_conf = folder / "pip.conf"
    pip_conf.write_text(f"[global]\nno-index = true\nfind-links = {wheels}\n")
    environment = {
        x: y
        for x, y in os.environ.items()
        if not x.startswith(("KERNELMARK_", "DOCKER_", "MLFLOW_", "PIP_", "COV", "MAKE", "MFLAGS"))
    }
    environment |= {
        "DOCKER_HOST": address,
        "KERNELMARK_PIP_CONF": str(pip_conf),
        "KERNELMARK_BUILD_NETWORK": "host",
        "KERNELMARK_HOME": str(folder / "home"),
        "PYTHONSAFEPATH": "1",
        "COLUMNS": "200",
    }
    if bundle := os.environ.get("SSL_CERT_FILE"):
        environment["KERNELMARK_CA_BUNDLE"] = bundle
    if not registry_answers():
        stand_in(STAND_IN, environment)
        environment["KERNELMARK_STAND_IN"] = STAND_IN
    return Machine(client, environment)


@pytest.fixture(scope="session")
def image(machine) -> docker.models.images.Image:
    """The cpu image of this checkout."""
    done = machine.kernelmark("image", "build", "cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    return machine.client.images.get(done.stdout.strip())


@pytest.fixture
def own_engine() -> type[OwnEngine]:
    """To start another engine, with a data folder of one's own choice."""
    return OwnEngine


@pytest.fixture(scope="session")
def password() -> str:
    """What must be found nowhere: it stands in the pip configuration that the build was given."""
    return PASSWORD


@pytest.fixture(scope="session")
def small_plan(tmp_path_factory) -> str:
    """A plan of one process, for what is not about the numbers: each more measures the device's ceilings again."""
    path = tmp_path_factory.mktemp("plan") / "small.toml"
    path.write_text(
        "replicates = 1\n[sampling]\nmax_seconds = 0.05\nmin_seconds = 0.01\nmax_samples = 20\nmin_samples = 3\n"
        "warmup_s = 0.05\n"
        '[[cases]]\noperator = "gelu"\naxes = { M = 64, N = [64, 128, 192, 256] }\n'
        'options = { approximate = "tanh" }\ndtype = "fp32"\n'
    )
    return str(path)
