"""What an administrator does with the registry's stack. `make registry*` calls it; docs/registry.md explains it.

    python admin.py up               builds the server's image, starts the stack, waits until it is healthy
    python admin.py down             stops it; its data stays
    python admin.py backup [FOLDER]  one file with the database and the artifacts
    python admin.py restore FILE     such a file into an empty registry
    python admin.py upgrade          backup, new image, `mlflow db upgrade`, start
    python admin.py user NAME        makes an account, or gives it a new password, and prints it

Runs on the host with Python 3.11 and nothing installed. Exit codes: 2 wrong usage or input, 5 something failed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Protocol

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
IMAGE = "kernelmark/registry"
LAYOUT = 1
"""Raised when a backup's layout changes."""

_START_S = 300.0  # a first start on two busy cores takes a minute
_DUMP, _ARTIFACTS, _MANIFEST = "database.dump", "artifacts.tar", "manifest.json"


class UsageError(Exception):
    """What the administrator can mend: exit code 2."""


class FailedError(Exception):
    """What went wrong on the way: exit code 5."""


class Services(Protocol):
    """The two services, as command lines that run something beside each of them."""

    def database(self, *command: str) -> list[str]:
        """A command of PostgreSQL's, connected to the registry's database."""
        ...

    def server(self, *command: str) -> list[str]:
        """A command of `server.py`, with the server's settings and volumes."""
        ...


@dataclass(frozen=True)
class Compose:
    """The stack under Docker Compose, its plug-in or the older program of its own."""

    program: tuple[str, ...]
    environment: Mapping[str, str]

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> Compose:
        """Raises `UsageError` where there is no engine or no Compose."""
        if shutil.which("docker") is None:
            raise UsageError("Docker is not installed: https://docs.docker.com/engine/install/")
        done = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True
        )
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            raise UsageError(f"Docker's engine does not answer: {said}")
        for program in (("docker", "compose"), ("docker-compose",)):
            if (
                shutil.which(program[0])
                and not subprocess.run([*program, "version"], capture_output=True).returncode
            ):
                break
        else:
            raise UsageError("Docker Compose is not installed: https://docs.docker.com/compose/install/")
        files = [HERE.parent / "compose.yaml"]
        files += [HERE.parent / "compose.s3.yaml"] if environment.get("KERNELMARK_REGISTRY_S3") else []
        project = environment.get("COMPOSE_PROJECT_NAME") or "kernelmark"
        named = [x for file in files for x in ("--file", str(file))]
        return cls((*program, "--project-name", project, *named), environment)

    def __call__(self, *arguments: str) -> None:
        """Runs a command of Compose's."""
        _run([*self.program, *arguments], env=self.environment)

    def build(self) -> None:
        """Builds the server's image, with BuildKit: an index's password and certificates reach no layer then."""
        plugin = not subprocess.run(["docker", "buildx", "version"], capture_output=True).returncode
        command = ["docker", *(("buildx", "build", "--load") if plugin else ("build",)), "--tag", IMAGE]
        for name, variable in (("BASE", "BASE"), ("REVISION", "REVISION"), ("LOCK_HASH", "LOCK")):
            if value := self.environment.get(f"KERNELMARK_REGISTRY_{variable}"):
                command += ["--build-arg", f"{name}={value}"]
        if network := self.environment.get("KERNELMARK_BUILD_NETWORK"):
            command += ["--network", network]
        for name, variable in (("pip_conf", "KERNELMARK_PIP_CONF"), ("ca_bundle", "KERNELMARK_CA_BUNDLE")):
            if path := self.environment.get(variable):
                if not Path(path).is_file():
                    raise UsageError(f"{variable} is {path}, and no file is there")
                command += ["--secret", f"id={name},src={path}"]
        _run([*command, str(HERE)], env={**self.environment, "DOCKER_BUILDKIT": "1"})

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        out = _run(
            [*self.program, "ps", "--all", "--quiet", service], env=self.environment, stdout=subprocess.PIPE
        )
        found = out.decode().split()
        if not found:
            raise UsageError("the registry is not up: make registry")
        return found[0]

    def database(self, *command: str) -> list[str]:
        """See `Services`."""
        return ["docker", "exec", "--interactive", self.container("database"), *command]

    def server(self, *command: str) -> list[str]:
        """See `Services`. A container of its own on the same volumes: the server may be down."""
        volumes = ("--volumes-from", self.container("server"))
        bare = ("--network", "none", "--read-only", "--cap-drop", "ALL", "--no-healthcheck")
        return ["docker", "run", "--rm", "--interactive", *volumes, *bare, IMAGE, *command]

    def wait(self, service: str) -> None:
        """Waits until a service is healthy. Raises `FailedError` with what it said last."""
        identity = self.container(service)
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            form = "{{.State.Status}} {{.State.Health.Status}} {{.RestartCount}}"
            status, healthy, restarts = (
                _run(["docker", "inspect", "--format", form, identity], stdout=subprocess.PIPE).decode().split()
            )
            if healthy == "healthy":
                return
            if status in ("exited", "dead") or int(restarts) > 2:
                break
            time.sleep(1)
        log = subprocess.run(["docker", "logs", "--tail", "8", identity], capture_output=True, text=True)
        raise FailedError(f"the {service} does not get healthy; it said:\n{log.stdout}{log.stderr}".rstrip())


def up(environment: Mapping[str, str]) -> None:
    """Starts the stack."""
    compose = _compose(environment)
    compose.build()
    compose("up", "--detach")
    compose.wait("server")
    address = f"http://{environment['KERNELMARK_REGISTRY_BIND']}:{environment['KERNELMARK_REGISTRY_PORT']}"
    print(f"the registry is up at {address}; on each machine that measures:\n")
    print(f"  export MLFLOW_TRACKING_URI={address}")
    print("  export MLFLOW_TRACKING_USERNAME=NAME MLFLOW_TRACKING_PASSWORD=...   # make registry-user NAME=...")


def down(environment: Mapping[str, str]) -> None:
    """Stops the stack; the volumes stay."""
    _compose(environment)("down")


def backup(environment: Mapping[str, str], folder: str | None = None) -> Path:
    """Writes a backup and returns it."""
    compose = _compose(environment)
    place = Path(folder or environment.get("KERNELMARK_REGISTRY_BACKUPS") or CHECKOUT / ".kernelmark" / "backups")
    path = save(compose, place, artifacts=not environment.get("KERNELMARK_REGISTRY_S3"))
    print(path)
    return path


def restore(environment: Mapping[str, str], file: str) -> None:
    """Brings a backup into an empty registry and starts it."""
    with Backup(Path(file)) as whole:
        compose = _compose(environment)
        compose("up", "--detach", "database")
        compose.wait("database")
        compose.build()
        compose("up", "--no-start", "server")
        load(compose, whole)
    up(environment)


def upgrade(environment: Mapping[str, str]) -> None:
    """Brings the stack to this checkout's version."""
    backup(environment)
    compose = _compose(environment)
    compose.build()
    compose("stop", "server")
    compose("run", "--rm", "-T", "--no-deps", "server", "upgrade")
    up(environment)


def user(environment: Mapping[str, str], name: str) -> None:
    """Makes an account or gives it a new password."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}", name):
        raise UsageError(f"{name!r} is no user's name: letters, digits, and . _ @ - only")
    port = environment["KERNELMARK_REGISTRY_PORT"]
    bind = environment["KERNELMARK_REGISTRY_BIND"]
    host = "127.0.0.1" if bind in ("0.0.0.0", "::") else bind
    admin = (Path(environment["KERNELMARK_REGISTRY_SECRETS"]) / "admin_password").read_text().strip()
    password = account(f"http://{host}:{port}", admin, name)
    print(f"export MLFLOW_TRACKING_USERNAME={name} MLFLOW_TRACKING_PASSWORD={password}")


def account(address: str, admin: str, name: str) -> str:
    """Makes an account with a random password, or gives an existing one a new password; returns that."""
    password = secrets.token_urlsafe(18)

    def call(method: str, path: str) -> int:
        body = json.dumps({"username": name, "password": password}).encode()
        request = urllib.request.Request(f"{address}/api/2.0/mlflow/users/{path}", body, method=method)
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", "Basic " + base64.b64encode(f"admin:{admin}".encode()).decode())
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError as error:
            raise FailedError(f"{address} does not answer: {error}") from None

    status = call("POST", "create")
    if status == 400:  # it exists
        status = call("PATCH", "update-password")
    if status == 401:
        raise UsageError("the server does not take the admin's password of the secrets' folder; was it changed?")
    if status != 200:
        raise FailedError(f"{address} answered with status {status}")
    return password


def save(services: Services, folder: Path, *, artifacts: bool = True) -> Path:
    """Writes a backup into a folder, whole or not at all. It holds password hashes: its owner's eyes only.

    The database first: what is added between the two is then in the archive without a row, which harms
    nobody, and no row is without its artifacts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"kernelmark-registry-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar"
    if path.exists():
        raise UsageError(f"{path} exists")
    part = path.with_suffix(".part")
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=folder) as name:
        work = Path(name)
        _to_file(services.database("pg_dump", "--format", "custom", "--no-owner"), work / _DUMP)
        files = [work / _DUMP]
        if artifacts:
            _to_file(services.server("save"), work / _ARTIFACTS)
            files.append(work / _ARTIFACTS)
        manifest = {"layout": LAYOUT, "sha256": {x.name: _sha256(x.open("rb")) for x in files}}
        (work / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        try:
            with (
                open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
                tarfile.open(fileobj=file, mode="w") as archive,
            ):
                for x in (work / _MANIFEST, *files):
                    archive.add(x, arcname=x.name)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path


class Backup:
    """A backup that was read through and is whole. Raises `UsageError` for one that is not."""

    def __init__(self, path: Path) -> None:
        try:
            self._archive = tarfile.open(path)  # noqa: SIM115  (closed by `__exit__`)
        except (OSError, EOFError, tarfile.TarError) as error:
            raise UsageError(f"{path} is no backup of a registry: {error}") from None
        try:
            self.names = self._checked(path)
        except (OSError, EOFError, tarfile.TarError, KeyError, ValueError) as error:
            self._archive.close()
            raise UsageError(f"{path} is no whole backup of a registry: {error}") from None
        except UsageError:
            self._archive.close()
            raise

    def _checked(self, path: Path) -> tuple[str, ...]:
        manifest = json.load(self.member(_MANIFEST))
        if manifest["layout"] != LAYOUT:
            raise UsageError(f"{path} has layout {manifest['layout']}; this checkout reads {LAYOUT}")
        for name, wanted in manifest["sha256"].items():
            if _sha256(self.member(name)) != wanted:
                raise UsageError(f"{path}: {name} is damaged")
        return tuple(manifest["sha256"])

    def member(self, name: str) -> IO[bytes]:
        """A file of the backup."""
        found = self._archive.extractfile(name)
        if found is None:
            raise KeyError(name)
        return found

    def __enter__(self) -> Backup:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()


def load(services: Services, backup: Backup) -> None:
    """Brings a backup into an empty database and an empty artifacts' folder. Raises `UsageError` for others."""
    tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
    counted = _run(
        services.database("psql", "--no-psqlrc", "--tuples-only", "--command", tables), stdout=subprocess.PIPE
    )
    if int(counted) > 0:
        raise UsageError(
            "the registry is not empty, and a backup is only restored into an empty one; docs/registry.md says "
            "how to remove it"
        )
    if _ARTIFACTS in backup.names:
        _from_file(backup.member(_ARTIFACTS), services.server("load"))
    whole = ("--single-transaction", "--exit-on-error", "--no-owner")
    # Without a database's name it would print SQL in place of running it.
    _from_file(
        backup.member(_DUMP),
        services.database("sh", "-c", f'exec pg_restore {" ".join(whole)} --dbname "$PGDATABASE"'),
    )


def _compose(environment: Mapping[str, str]) -> Compose:
    made(Path(environment["KERNELMARK_REGISTRY_SECRETS"]), environment)
    return Compose.find(environment)


def made(folder: Path, environment: Mapping[str, str]) -> None:
    """Sees to it that the folder of secrets holds them all. Only the admin's password is somebody's to choose."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    wanted = ["admin_password", "database_password", "session_key"]
    if environment.get("KERNELMARK_REGISTRY_S3"):
        wanted.append("aws_credentials")
    given = {name: secrets.token_urlsafe(32) for name in ("database_password", "session_key")}
    if password := environment.get("KERNELMARK_REGISTRY_ADMIN_PASSWORD"):
        given["admin_password"] = password
    for name in wanted:
        path = folder / name
        if path.exists():
            continue
        if name not in given:
            also = ", or set KERNELMARK_REGISTRY_ADMIN_PASSWORD once" if name == "admin_password" else ""
            raise UsageError(f"write {name.replace('_', ' ')} to {path}{also}: there is no default")
        if name == "admin_password" and len(given[name]) < 12:
            raise UsageError("the admin's password must have 12 characters or more")
        path.write_text(given[name] + "\n")
        path.chmod(0o444)


def _run(command: Sequence[str], **options: object) -> bytes:
    """Runs a command and returns its output, if that is piped. Raises `FailedError`."""
    done = subprocess.run(command, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise FailedError(f"`{' '.join(command)}` ended with code {done.returncode}")
    return done.stdout or b""


def _to_file(command: Sequence[str], path: Path) -> None:
    with path.open("wb") as file:
        _run(command, stdout=file)


def _from_file(file: IO[bytes], command: Sequence[str]) -> None:
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        with process.stdin:
            shutil.copyfileobj(file, process.stdin)
    except BrokenPipeError:
        pass  # it ended before the end: its exit code says so
    if process.wait():
        raise FailedError(f"`{' '.join(command)}` ended with code {process.returncode}; the registry is not whole")


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    with file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with its defaults, as compose.yaml wants it."""
    config = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    defaults = {
        "KERNELMARK_REGISTRY_SECRETS": str(config / "kernelmark" / "registry"),
        "KERNELMARK_REGISTRY_BIND": "127.0.0.1",
        "KERNELMARK_REGISTRY_PORT": "5000",
        "KERNELMARK_REGISTRY_REVISION": _revision(),
        "KERNELMARK_REGISTRY_LOCK": _sha256((HERE / "requirements.txt").open("rb")),
    }
    given = {name: value for name, value in environment.items() if value}
    return {**environment, **defaults, **given}


def _revision() -> str:
    """The checkout's commit; none where it is no checkout or git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main(arguments: Sequence[str]) -> int:
    """Runs the command that is named."""
    commands: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
        "up": (up, (0,)),
        "down": (down, (0,)),
        "backup": (backup, (0, 1)),
        "restore": (restore, (1,)),
        "upgrade": (upgrade, (0,)),
        "user": (user, (1,)),
    }
    name, *rest = arguments or [""]
    if name not in commands or len([x for x in rest if x]) not in commands[name][1]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        commands[name][0](settings(os.environ), *rest)
    except (UsageError, FailedError) as error:
        print(f"registry: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 5
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
