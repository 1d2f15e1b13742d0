"""A real PostgreSQL, and the registry's server on it, started by the module that the image starts."""

from __future__ import annotations

import base64
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from kernelmark.registry.store.journal import encode
from kernelmark.registry.store.record import Case, Footer, Header, Measurement, Record

HOUSE = Path(__file__).resolve().parents[3]
PARTS = HOUSE / "docker" / "registry"
PASSWORDS = {
    # As awkward as libpq's file of passwords, an INI file and a URI find them.
    "database_password": "da:ta\\ba%se/@secret",
    "admin_password": "admin%(here)s:#secret",
    "session_key": "session-key-secret",
}


def missing(what: str) -> NoReturn:
    """Skips the test; in CI, where nothing may be skipped unseen, it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, so the registry's server was not tested")
    pytest.skip(what)


def _load(name: str) -> ModuleType:
    """A module of docker/registry, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docker_registry_{name}", PARTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def admin() -> ModuleType:
    """docker/registry/admin.py"""
    return _load("admin")


@pytest.fixture(scope="session")
def server_module() -> ModuleType:
    """docker/registry/server.py"""
    return _load("server")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the developer's registry."""
    for name in list(os.environ):
        if name.startswith(("KERNELMARK_", "MLFLOW_", "PG")):
            monkeypatch.delenv(name)


class Cluster:
    """A PostgreSQL cluster in a folder of its own, for any number of databases."""

    def __init__(self, folder: Path, tools: Path, port: int) -> None:
        self.folder = folder
        self.tools = tools
        self.port = port
        # PostgreSQL refuses to run as root.
        self._user = pwd.getpwnam("nobody").pw_uid if os.getuid() == 0 else None

    def _as_user(self, *command: str) -> None:
        named = {} if self._user is None else {"user": self._user, "group": 65534, "extra_groups": []}
        # A file and no pipe: the server that pg_ctl starts keeps what it inherits.
        with open(self.folder / "errors", "w") as errors:
            done = subprocess.run(
                [str(self.tools / command[0]), *command[1:]],
                cwd=self.folder,
                stdout=errors,
                stderr=errors,
                **named,  # type: ignore[arg-type]
            )
        assert done.returncode == 0, (self.folder / "errors").read_text()

    def make(self) -> None:
        """initdb and start."""
        if self._user is not None:
            os.chown(self.folder, self._user, 65534)
        secret = self.folder / "password"
        secret.write_text(PASSWORDS["database_password"])
        secret.chmod(0o644)
        # As in the image: the network must have the password, the database's own container is trusted.
        trust = ("--auth-local", "trust", "--auth-host", "scram-sha-256")
        self._as_user(
            *("initdb", "--pgdata", "data", "--username", "kernelmark", "--encoding", "UTF8", "--no-sync"),
            *("--pwfile", "password", *trust),
        )
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        options = f"-k {self.folder} -p {self.port} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._as_user("pg_ctl", "-D", "data", "-w", "-l", "log", "-o", options, "start")

    def stop(self) -> None:
        """Ends it at once, as a machine that loses power would."""
        self._as_user("pg_ctl", "-D", "data", "-w", "-m", "immediate", "stop")

    def local(self, database: str) -> dict[str, str]:
        """The variables of a client in the database's own container."""
        return {
            "PGHOST": str(self.folder),
            "PGPORT": str(self.port),
            "PGUSER": "kernelmark",
            "PGDATABASE": database,
        }

    def remote(self, database: str) -> dict[str, str]:
        """The variables of a client elsewhere."""
        return self.local(database) | {"PGHOST": "127.0.0.1"}

    def query(self, database: str, sql: str) -> list[list[str]]:
        """Rows of a query, as text."""
        command = [str(self.tools / "psql"), "-X", "--tuples-only", "--no-align", "--field-separator", "\x1f"]
        done = subprocess.run(
            [*command, "--record-separator", "\x1e", "--set", "ON_ERROR_STOP=1", "--command", sql],
            env={**os.environ, **self.local(database)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        text = done.stdout.removesuffix("\n").removesuffix("\x1e")
        return [x.split("\x1f") for x in text.split("\x1e")] if text else []

    def create(self, database: str) -> str:
        """An empty database."""
        self.query("postgres", f'CREATE DATABASE "{database}"')
        return database


def free_port() -> int:
    """A port of loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A running PostgreSQL."""
    places = [
        *Path("/usr/lib/postgresql").glob("*/bin"),
        *filter(None, [Path(shutil.which("initdb") or "").parent]),
    ]
    tools = next((x for x in reversed(places) if (x / "initdb").exists() and (x / "pg_dump").exists()), None)
    if tools is None:
        missing("PostgreSQL is not installed (Debian: postgresql)")
    # Not pytest's own folder: another user must get in, and a socket's path has 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="registry-"))
    made = Cluster(folder, tools, free_port())
    try:
        made.make()
        yield made
        made.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Registry:
    """The registry's server on a database, in processes of its own."""

    # `localhost` is none of its names, so that the tests have a foreign one that resolves.
    HOSTS = "127.0.0.1,registry.example.org"

    def __init__(self, python: Path, cluster: Cluster, database: str, folder: Path) -> None:
        self.python = python
        self.cluster = cluster
        self.database = database
        self.folder = folder
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.artifacts = folder / "artifacts"
        self.artifacts.mkdir(parents=True)
        self.secrets = folder / "secrets"
        self.secrets.mkdir()
        for name, text in PASSWORDS.items():
            (self.secrets / name).write_text(text + "\n")
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What compose.yaml sets."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {
            **kept,
            **self.cluster.remote(self.database),
            "KERNELMARK_REGISTRY_HOSTS": self.HOSTS,
            "KERNELMARK_REGISTRY_PORT": str(self.port),
            "KERNELMARK_REGISTRY_SECRETS": str(self.secrets),
            "KERNELMARK_REGISTRY_ARTIFACTS": str(self.artifacts),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.folder),
        }

    def command(self, *arguments: str) -> list[str]:
        """A command line of server.py."""
        return [str(self.python), str(PARTS / "server.py"), *arguments]

    def run(self, *arguments: str, **changes: str) -> tuple[int, str]:
        """Runs server.py to its end: exit code, and all it said."""
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            cwd=self.folder,
        )
        return done.returncode, done.stdout

    def start(self) -> None:
        """Starts it, and waits until its health check is content."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self.command("serve"),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )
        end = time.monotonic() + 240
        while self.run("health")[0]:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.3)

    def end(self, number: int) -> None:
        """Sends a signal to the server and all it started, and waits."""
        if self._process is not None:
            os.killpg(self._process.pid, number)
            self._process.wait(60)
            self._process = None

    def said(self) -> str:
        """Its log."""
        return self.log.read_text()

    def command_lines(self) -> str:
        """What `ps` shows of its processes."""
        assert self._process is not None
        lines = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(entry.name)) == self._process.pid:
                    lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it ended meanwhile
        return "\n".join(lines)

    @property
    def administrator(self) -> str:
        """The header with which the administrator asks."""
        return "Basic " + base64.b64encode(f"admin:{PASSWORDS['admin_password']}".encode()).decode()

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, str]:
        """A request by hand: status and text."""
        request = urllib.request.Request(self.address + path, body, method=method)
        for name, value in headers.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


class Local:
    """`admin.Services` without containers: PostgreSQL's tools and server.py where they stand."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def database(self, *command: str) -> list[str]:
        """See `admin.Services`."""
        cluster = self.registry.cluster
        named = [f"{x}={y}" for x, y in cluster.local(self.registry.database).items()]
        return ["env", f"PATH={cluster.tools}:{os.environ['PATH']}", *named, *command]

    def server(self, *command: str) -> list[str]:
        """See `admin.Services`."""
        return [
            "env",
            *(f"{x}={y}" for x, y in self.registry.environment.items()),
            *self.registry.command(*command),
        ]


@pytest.fixture(scope="session")
def server_python() -> Path:
    """The Python of the environment that holds what the image's lock names."""
    path = HOUSE / "build" / "registry" / "bin" / "python"
    if not path.exists():
        missing("the server's environment is not made: make test-registry")
    return path


MakeRegistry = Callable[..., Registry]


@pytest.fixture(scope="module")
def make_registry(
    cluster: Cluster, server_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeRegistry]:
    """Makes a registry on a new database; it is ended with the module."""
    made: list[Registry] = []

    def make(name: str) -> Registry:
        folder = tmp_path_factory.mktemp(f"registry-{name}")
        made.append(Registry(server_python, cluster, cluster.create(name), folder))
        return made[-1]

    yield make
    for x in made:
        x.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def registry(make_registry: MakeRegistry) -> Registry:
    """A running registry, its database fresh."""
    made = make_registry("fresh")
    made.start()
    return made


class Member:
    """Somebody with journals, an account, and `kernelmark` as a process."""

    def __init__(self, home: Path, address: str, name: str, password: str) -> None:
        self.home = home
        self.environment = {
            **os.environ,
            "KERNELMARK_HOME": str(home),
            "MLFLOW_TRACKING_URI": address,
            "MLFLOW_TRACKING_USERNAME": name,
            "MLFLOW_TRACKING_PASSWORD": password,
            # The machine may have much else to do; a server that is down refuses at once all the same.
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
            "PYTHONSAFEPATH": "1",
        }

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        """Starts a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "kernelmark.suite", *arguments],
            env=self.environment | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **changes: str) -> tuple[int, str, str]:
        """Runs a command: exit code, output, error output."""
        process = self.start(*arguments, **changes)
        out, err = process.communicate(timeout=800)
        return process.returncode, out, err


def write_journal(
    home: Path, run: str, cases: int, implementations: Sequence[str] = ("kernelmark", "torch")
) -> Path:
    """A journal of cases × implementations, each row with times of its own."""
    path = home / "journals" / f"{run}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = Header(
        schema_version=2,
        run=run,
        created="2026-11-20T12:00:00Z",
        harness="0.1.0",
        commit="0123456789abcdef0123456789abcdef01234567",
        dirty=False,
        plan="quick",
        seed=1,
        replicates=1,
        device="cuda",
        key="00aa11bb22cc33dd",
        conditions={"gpu": "NVIDIA H200"},
        environment={"python": "3.12.3"},
    )
    lines = [encode(header)]
    for i in range(cases):
        size = 16 * (i + 1)
        case = Case(
            "gelu", f"M{size}-N64-bf16-forward", {"M": size, "N": 64}, {}, "bf16", "forward", "5bec", size * 256, 0
        )
        for j, name in enumerate(implementations):
            ms = 0.01 * (i + 1) + 0.0001 * j
            measured = Measurement({"latency": (ms, ms * 1.01, ms * 1.02), "error": (0.001,)}, "cuda_event")
            lines.append(encode(Record(case, name, name, "1.0", 0, j, "cold", "ok", None, measured)))
    lines.append(encode(Footer("2026-11-20T12:01:00Z", 60.0, True, {"sample": 60.0})))
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture(scope="session")
def journal_writer() -> Callable[..., Path]:
    """See `write_journal`."""
    return write_journal


@pytest.fixture(scope="session")
def make_member(admin: ModuleType) -> Callable[[Registry, str, Path], Member]:
    """Makes an account on a registry, and a member who uses it from a home."""

    def make(registry: Registry, name: str, home: Path) -> Member:
        password = admin.account(registry.address, PASSWORDS["admin_password"], name)
        return Member(home, registry.address, name, password)

    return make


@pytest.fixture(scope="session")
def local() -> Callable[[Registry], Local]:
    """See `Local`."""
    return Local
