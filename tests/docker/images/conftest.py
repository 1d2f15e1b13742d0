"""A real Docker engine, a base to build on, and the cpu image, once a session.

An engine that runs is used; else one is started here, as root, with a data folder of its own. Without either the
tests fail in CI and are skipped elsewhere. Everything is done through the command line, as a user would.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
import pytest

HOUSE = Path(__file__).resolve().parents[3]
KERNELMARK = Path(sys.executable).with_name("kernelmark")
CACHE = HOUSE / "build" / "images"
LOG = CACHE / "dockerd.log"
STAND_IN = "kernelmark-stand-in:bookworm"
PASSWORD = "correct-horse-battery-staple"  # pragma: allowlist secret  # of an index that asks for none
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


def missing(reason: str) -> None:
    """Red in CI, where nobody would see a skip."""
    if os.environ.get("CI"):
        pytest.fail(f"no image was tested: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def engine() -> Iterator[tuple[docker.DockerClient, str]]:
    """An engine's client and address."""
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if listens(address):
        client = docker.DockerClient(base_url=address)
        client.ping()
        yield client, address
        client.close()
        return
    if "DOCKER_HOST" in os.environ:
        missing(f"DOCKER_HOST is {address} and does not answer")
    if shutil.which("dockerd") is None:
        missing("there is no Docker engine and no dockerd to start one with (apt-get install docker.io)")
    if os.geteuid() != 0:
        missing("there is no Docker engine, and only root can start one")
    with OwnEngine(CACHE / "engine") as (client, address):
        yield client, address


def listens(address: str) -> bool:
    """Whether somebody listens; an SDK's client that fails leaves its socket open."""
    if not address.startswith("unix://"):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(address.removeprefix("unix://")) == 0


class OwnEngine:
    """A dockerd of our own, ended on the way out. Its sockets lie in /tmp: their paths must be short."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def __enter__(self) -> tuple[docker.DockerClient, str]:
        self.data.mkdir(parents=True, exist_ok=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        self.place = Path(tempfile.mkdtemp(prefix="km-engine-", dir="/tmp"))
        address = f"unix://{self.place}/docker.sock"
        command = [
            "dockerd",
            "--host",
            address,
            "--data-root",
            str(self.data),
            "--exec-root",
            f"{self.place}/exec",
        ]
        command += ["--pidfile", f"{self.place}/pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
        with open(LOG, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.client = None
        for _ in range(120):
            time.sleep(0.5)
            if self.process.poll() is not None:
                break
            if listens(address):
                self.client = docker.DockerClient(base_url=address, timeout=300)
                return self.client, address
        self.__exit__()
        missing("dockerd did not start: " + LOG.read_text(errors="replace")[-600:])
        raise AssertionError

    def __exit__(self, *exception: object) -> None:
        if self.client is not None:
            self.client.close()
        self.process.terminate()
        self.process.wait(timeout=60)
        shutil.rmtree(self.place, ignore_errors=True)


@pytest.fixture(scope="session")
def wheels() -> Iterator[str]:
    """An index of all locked packages on this machine, fetched as this machine fetches packages; its address."""
    folder = CACHE / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    for lock in LOCKS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--python-version", "3.11", "--dest", str(folder), "-r", lock]
        command += [f"--platform={x}_x86_64" for x in ("manylinux_2_28", "manylinux2014", "manylinux1")]
        done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://builder:{PASSWORD}@127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


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
    if not _registry_answers():
        done = subprocess.run(
            [str(HOUSE / "docker" / "stand-in"), STAND_IN],
            env={**environment, "PATH": f"/usr/sbin:/sbin:{environment['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            missing(f"no registry answers and there is no stand-in for the base: {done.stderr[-600:]}")
        environment["KERNELMARK_STAND_IN"] = STAND_IN
    return Machine(client, environment)


def _registry_answers() -> bool:
    try:
        with socket.create_connection(("registry-1.docker.io", 443), timeout=10):
            return True
    except OSError:
        return False


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
