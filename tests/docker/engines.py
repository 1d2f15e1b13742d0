"""A real Docker engine for tests, what packages are installed from in its builds, and whether a registry answers.

An engine that runs is used; else one is started here, as root, with a data folder of its own. Without either the
tests fail in CI and are skipped elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import docker
import pytest

HOUSE = Path(__file__).resolve().parents[2]
PASSWORD = "correct-horse-battery-staple"  # pragma: allowlist secret  # of an index that asks for none


def missing(reason: str) -> None:
    """Red in CI, where nobody would see a skip."""
    if os.environ.get("CI"):
        pytest.fail(f"no image was tested: {reason}")
    pytest.skip(reason)


def listens(address: str) -> bool:
    """Whether somebody listens; an SDK's client that fails leaves its socket open."""
    if not address.startswith("unix://"):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(address.removeprefix("unix://")) == 0


class OwnEngine:
    """A dockerd of our own, ended on the way out. Its sockets lie in /tmp: their paths must be short.

    Containers have no network but the host's, unless `networks` lets it make bridges and rules of iptables, whose
    empty chains stay behind.
    """

    def __init__(self, data: Path, networks: bool = False) -> None:
        self.data = data
        self.log = data.with_name("dockerd.log")
        self.networks = networks

    def __enter__(self) -> tuple[docker.DockerClient, str]:
        self.data.mkdir(parents=True, exist_ok=True)
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
        command += ["--pidfile", f"{self.place}/pid", "--bridge=none"]
        command += () if self.networks else ("--iptables=false", "--ip6tables=false")
        with open(self.log, "ab") as log:
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
        missing("dockerd did not start: " + self.log.read_text(errors="replace")[-600:])
        raise AssertionError

    def __exit__(self, *exception: object) -> None:
        if self.client is not None:
            self.client.close()
        self.process.terminate()
        self.process.wait(timeout=60)
        shutil.rmtree(self.place, ignore_errors=True)


@contextlib.contextmanager
def any_engine(data: Path, networks: bool = False) -> Iterator[tuple[docker.DockerClient, str]]:
    """The engine that is there, or one of our own: its client and address."""
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
    with OwnEngine(data, networks) as (client, address):
        yield client, address


@contextlib.contextmanager
def wheel_index(folder: Path, locks: Sequence[str]) -> Iterator[str]:
    """An index of all packages of these locks on this machine, fetched as this machine fetches packages; its
    address, with `PASSWORD` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for lock in locks:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--only-binary", ":all:", "--python-version", "3.11", "--dest", str(folder), "-r", lock]
        command += [f"--platform={x}_x86_64" for x in ("manylinux_2_28", "manylinux2014", "manylinux1")]
        done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://builder:{PASSWORD}@127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def registry_answers() -> bool:
    """Whether images can be fetched."""
    try:
        with socket.create_connection(("registry-1.docker.io", 443), timeout=10):
            return True
    except OSError:
        return False


def stand_in(name: str, environment: dict[str, str]) -> None:
    """Makes a plain distribution's image of that name, as `docker/stand-in` says."""
    done = subprocess.run(
        [str(HOUSE / "docker" / "stand-in"), name],
        env={**environment, "PATH": f"/usr/sbin:/sbin:{environment['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        missing(f"no registry answers and there is no stand-in for the base: {done.stderr[-600:]}")
