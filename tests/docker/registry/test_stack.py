"""The registry's stack under a real Docker engine, by the administrator's own commands.

It stands on the pinned images where a registry answers, else on Debian's Python and PostgreSQL (docker/stand-in).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernelmark.suite.container.build import _builder

from ..engines import HOUSE, PASSWORD, any_engine, missing, registry_answers, stand_in, wheel_index
from .conftest import Member, free_port
from .test_server import ROWS, expected

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

CACHE = HOUSE / "build" / "stack"
ADMIN = HOUSE / "docker" / "registry" / "admin.py"
DATABASE, BASE = "kernelmark-stand-in:postgres", "kernelmark-stand-in:registry"
ADMINISTRATOR = "a-password-of-the-administrator"  # pragma: allowlist secret  # of a registry that ends here
CASES = 20


class Stack:
    """One project of Compose's; `address` as a member needs it."""

    def __init__(self, environment: dict[str, str], name: str, folder: Path, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.environment = {
            **environment,
            "COMPOSE_PROJECT_NAME": name,
            "KERNELMARK_REGISTRY_SECRETS": str(folder / "secrets"),
            "KERNELMARK_REGISTRY_ADMIN_PASSWORD": ADMINISTRATOR,
            "KERNELMARK_REGISTRY_PORT": str(port),
        }
        self.name = name

    def admin(self, *arguments: str, code: int = 0) -> str:
        """Runs a command of admin.py: what it printed, and where it is to fail what it said."""
        done = subprocess.run(
            [sys.executable, str(ADMIN), *arguments], env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stderr if code else done.stdout

    def docker(self, *arguments: str) -> str:
        """Output of a command of Docker's."""
        done = subprocess.run(["docker", *arguments], env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def container(self, service: str) -> str:
        """A service's container."""
        labels = {"project": self.name, "service": service}
        named = [f"--filter=label=com.docker.compose.{x}={y}" for x, y in labels.items()]
        return self.docker("ps", "--all", "--quiet", *named).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        """What Docker knows of it."""
        (found,) = json.loads(self.docker("inspect", self.container(service)))
        return dict(found)

    def healthy(self, service: str, restarts: int) -> bool:
        """Whether it is up again after that many restarts."""
        found = self.inspect(service)
        return found["RestartCount"] >= restarts and found["State"].get("Health", {}).get("Status") == "healthy"

    def query(self, sql: str) -> list[list[str]]:
        """Rows of a query, as text."""
        command = ["psql", "-X", "--tuples-only", "--no-align", "--field-separator", "\t", "--command", sql]
        said = self.docker("exec", self.container("database"), *command)
        return [x.split("\t") for x in said.splitlines()]

    def finished(self) -> int:
        """How many runs of MLflow's are whole."""
        return int(self.query("SELECT count(*) FROM runs WHERE status = 'FINISHED'")[0][0])

    def rows(self) -> dict[tuple[str, str, str], float]:
        """Each row's median by what identifies it. Fails where one stands there twice, or is not whole."""
        lines = self.query(ROWS)
        assert max(Counter(tuple(x[:3]) for x in lines).values(), default=1) == 1
        assert {x[3] for x in lines} <= {"FINISHED"}
        return {(run, case, implementation): float(ms) for run, case, implementation, _, ms in lines}

    def remove(self) -> None:
        """Takes the project away with its data."""
        subprocess.run([sys.executable, str(ADMIN), "down"], env=self.environment, check=False)
        for volume in ("database", "artifacts"):
            subprocess.run(
                ["docker", "volume", "rm", "--force", f"{self.name}_{volume}"], env=self.environment, check=False
            )


def wait_for(what: Callable[[], bool], name: str) -> None:
    """Up to five minutes."""
    end = time.monotonic() + 300
    while not what():
        assert time.monotonic() < end, f"{name} did not come"
        time.sleep(1)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An engine, an index of packages, and bases to build on, as variables."""
    dropped = ("KERNELMARK_", "DOCKER_", "COMPOSE_", "MLFLOW_", "PIP_", "COV")
    found = {x: y for x, y in os.environ.items() if not x.startswith(dropped)}
    # Of several docker commands the one that can build.
    found["PATH"] = f"{Path(_builder()[0]).parent}:{found['PATH']}"
    if shutil.which("docker-compose") is None and "compose" not in subprocess.getoutput("docker --help"):
        missing("Docker Compose is not installed (apt-get install docker-compose)")
    with (
        any_engine(CACHE / "engine", networks=True) as (_, address),
        wheel_index(CACHE / "wheels", ["docker/registry/requirements.txt"]) as index,
    ):
        pip_conf = tmp_path_factory.mktemp("pip") / "pip.conf"
        pip_conf.write_text(f"[global]\nno-index = true\nfind-links = {index}\n")
        found |= {
            "DOCKER_HOST": address,
            "KERNELMARK_PIP_CONF": str(pip_conf),
            "KERNELMARK_BUILD_NETWORK": "host",
        }
        if bundle := os.environ.get("SSL_CERT_FILE"):
            found["KERNELMARK_CA_BUNDLE"] = bundle
        if not registry_answers():
            stand_in(BASE, found | {"PACKAGES": "ca-certificates,python3,python3-venv,postgresql"})
            place = Path(__file__).with_name("stand-in")
            command = [*_builder(), "--quiet", "--build-arg", f"BASE={BASE}", "--tag", DATABASE, str(place)]
            done = subprocess.run(command, env=found | {"DOCKER_BUILDKIT": "1"}, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            found |= {"KERNELMARK_REGISTRY_BASE": BASE, "KERNELMARK_REGISTRY_POSTGRES": DATABASE}
        yield found


MakeStack = Callable[[str], Stack]


@pytest.fixture(scope="module")
def make_stack(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeStack]:
    """Makes a project of that name, taken away with the module."""
    made: list[Stack] = []

    def make(name: str) -> Stack:
        made.append(Stack(environment, name, tmp_path_factory.mktemp(name), free_port()))
        return made[-1]

    yield make
    for x in made:
        x.remove()


@pytest.fixture(scope="module")
def stack(make_stack: MakeStack) -> Stack:
    """The stack, up."""
    made = make_stack("kernelmark-test")
    assert f"the registry is up at {made.address}" in made.admin("up")
    return made


@pytest.fixture(scope="module")
def member(stack: Stack, journal_writer: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Member:
    """Somebody with an account, and a journal that is recorded."""
    home = tmp_path_factory.mktemp("member")
    journal_writer(home, "20261120-000001-first", CASES)
    said = stack.admin("user", "ada").split()
    assert said[:2] == ["export", "MLFLOW_TRACKING_USERNAME=ada"]
    found = Member(home, stack.address, "ada", said[2].removeprefix("MLFLOW_TRACKING_PASSWORD="))
    told = f"20261120-000001-first: {2 * CASES} rows recorded, 0 updated, 0 already there\n"
    assert found.run("sync")[:2] == (0, told)
    return found


def test_what_is_recorded_is_there_and_who_gets_in(stack: Stack, member: Member) -> None:
    wanted = expected(sorted((member.home / "journals").glob("*.jsonl")))
    assert stack.rows() == pytest.approx(wanted)
    assert member.run("sync", MLFLOW_TRACKING_PASSWORD="another")[0] == 2


def test_what_the_containers_may_and_what_is_in_them(stack: Stack, member: Member) -> None:
    server, database = stack.inspect("server"), stack.inspect("database")
    assert server["Config"]["User"] == "10001:10001"
    assert server["HostConfig"]["ReadonlyRootfs"] is True
    for found in (server, database):
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        assert "no-new-privileges:true" in found["HostConfig"]["SecurityOpt"]
    assert {y["HostIp"] for x in server["NetworkSettings"]["Ports"].values() for y in x or ()} == {"127.0.0.1"}
    assert not any(database["NetworkSettings"]["Ports"].values())
    secrets = [x.read_text().strip() for x in Path(stack.environment["KERNELMARK_REGISTRY_SECRETS"]).iterdir()]
    assert len(secrets) == 3
    told = json.dumps([server, database]) + stack.docker("history", "--no-trunc", "kernelmark/registry")
    told += stack.docker("top", stack.container("server"), "-eo", "pid,args")
    assert "mlflow" in told
    assert not [x for x in (*secrets, ADMINISTRATOR, PASSWORD) if x in told]
    # Of the build's secrets nothing is in the image: neither the index's password nor a file of them.
    files = "/run/secrets/pip.conf /run/secrets/ca.crt"
    look = f"! grep --recursive --quiet {PASSWORD} /opt /etc /root /tmp /run && ! ls {files}"
    alone = ("--rm", "--user=0", "--network=none", "--entrypoint=sh", "kernelmark/registry", "-c", look)
    stack.docker("run", *alone)


def test_the_server_and_the_database_are_killed_and_nothing_is_lost(
    stack: Stack, member: Member, journal_writer: Callable[..., Path]
) -> None:
    journal_writer(member.home, "20261120-000002-second", 4 * CASES)
    wanted = expected(sorted((member.home / "journals").glob("*.jsonl")))
    before = stack.finished()
    writing = member.start("sync")
    wait_for(lambda: stack.finished() > before + CASES // 2 or writing.poll() is not None, "a row")
    assert writing.poll() is None, writing.communicate()
    # From within, as it does not count as the administrator's wish: all but the first process and itself.
    kill = "import os, signal; os.kill(-1, signal.SIGKILL)"
    stack.docker("exec", stack.container("server"), "/opt/registry/bin/python", "-c", kill)
    _, errors = writing.communicate(timeout=300)
    assert (writing.returncode, "Nothing is lost" in errors) == (5, True), errors
    assert stack.finished() < len(wanted), "killed too late to show anything"
    wait_for(lambda: stack.healthy("server", 1), "the server")
    stack.docker("exec", "--user=postgres", stack.container("database"), "sh", "-c", "kill -QUIT 1")
    wait_for(lambda: stack.healthy("database", 1), "the database")
    code, out, errors = member.run("sync")
    assert code == 0, out + errors
    assert stack.rows() == pytest.approx(wanted)


def test_stopped_upgraded_backed_up_and_restored(
    stack: Stack, member: Member, make_stack: MakeStack, tmp_path: Path
) -> None:
    rows = stack.rows()
    assert rows
    path = stack.admin("backup", str(tmp_path)).split()[-1]
    stack.admin("down")
    assert stack.container("server") == ""
    stack.admin("up")
    assert stack.rows() == rows
    assert "not empty" in stack.admin("restore", path, code=2)
    stack.environment["KERNELMARK_REGISTRY_BACKUPS"] = str(tmp_path / "before")
    assert "schema " in stack.admin("upgrade")
    assert len(list((tmp_path / "before").iterdir())) == 1
    assert stack.rows() == rows
    code, out, errors = member.run("sync")
    assert (code, "complete already: " in out) == (0, True), out + errors
    stack.admin("down")  # two of them at once would want twice the memory
    other = make_stack("kernelmark-restored")
    other.admin("restore", path)
    assert other.rows() == rows
