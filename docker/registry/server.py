"""The registry's server: its settings, its arguments and its health check, in one place for image and tests.

    python server.py serve           the MLflow server, in this process
    python server.py upgrade         brings the database to this MLflow's schema
    python server.py health          exit code 0 if the server and its database answer
    python server.py save            the artifacts as a tar archive on standard output
    python server.py load            such an archive from standard input, into an empty folder

The database is named by libpq's own variables (PGHOST, PGPORT, PGUSER, PGDATABASE). Passwords come from files
in KERNELMARK_REGISTRY_SECRETS and get into no command line, no URI and no variable of the container, where
`docker inspect`, `ps` and MLflow's messages would show them.

What is imported at the top is the standard library's: the health check starts every few seconds.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import secrets
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

DATABASE = "postgresql+psycopg2://"
"""Everything else about the database is in libpq's variables. SQLAlchemy 2.1 would take psycopg 3 by itself."""

# A password is checked with PBKDF2, some 0.1 s of a core, on each of the four requests that a row takes. MLflow
# can remember a password that was right; a changed one is then known to all workers after this time.
_AUTH_CACHE_S = 60

# By default uvicorn ends a worker that gives no sign of life for 5 s, with all that it is answering. One that has
# much to do, or is still loading MLflow on a machine that has, takes longer.
_HEALTHCHECK_S = 60

_AUTH = """[mlflow]
default_permission = {permission}
database_uri = {database}
admin_username = admin
auth_cache_ttl_seconds = {cache_s}
"""


@dataclass(frozen=True)
class Settings:
    """What a registry's administrator can set. `hosts` are the names that users know the server by."""

    hosts: tuple[str, ...]
    listen: str
    port: int
    workers: int
    permission: str
    artifacts: str
    secrets: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """From KERNELMARK_REGISTRY_*; an empty variable counts as one that is not set."""

        def get(name: str, default: str) -> str:
            return environment.get(f"KERNELMARK_REGISTRY_{name}") or default

        return cls(
            hosts=tuple(x for x in (y.strip() for y in get("HOSTS", "localhost,127.0.0.1").split(",")) if x),
            listen=get("LISTEN", "127.0.0.1"),
            port=int(get("PORT", "5000")),
            workers=int(get("WORKERS", "2")),
            permission=get("PERMISSION", "MANAGE"),
            artifacts=get("ARTIFACTS", "/artifacts"),
            secrets=Path(get("SECRETS", "/run/secrets")),
        )

    def secret(self, name: str) -> str:
        """A secret's text. Ends the program if there is none: nothing here has a default password."""
        path = self.secrets / name
        try:
            text = path.read_text().strip()
        except OSError as error:
            raise SystemExit(f"secret {path} cannot be read: {error.strerror}") from None
        if not text:
            raise SystemExit(f"secret {path} is empty")
        return text


def command(settings: Settings) -> list[str]:
    """The server's command line. Holds no secret."""
    own = f"127.0.0.1:{settings.port}"  # what the health check says
    hosts = [own, *settings.hosts, *(f"{x}:*" for x in settings.hosts if ":" not in x)]
    # The UI's own requests carry the name it was opened under as their origin.
    origins = [f"{scheme}://{x}" for scheme in ("http", "https") for x in hosts if x != own]
    return [
        *(sys.executable, "-m", "mlflow", "server"),
        *("--host", settings.listen, "--port", str(settings.port), "--workers", str(settings.workers)),
        *("--backend-store-uri", DATABASE),
        *("--serve-artifacts", "--artifacts-destination", settings.artifacts),
        *("--allowed-hosts", ",".join(hosts), "--cors-allowed-origins", ",".join(origins)),
        *("--app-name", "basic-auth"),
        *("--uvicorn-opts", f"--timeout-worker-healthcheck={_HEALTHCHECK_S}"),
    ]


def environment(settings: Settings, private: Path) -> dict[str, str]:
    """The variables that the server and its migrations need; `private` is a folder for their own files."""
    passwords = private / "pgpass"
    escaped = settings.secret("database_password").replace("\\", "\\\\").replace(":", "\\:")
    _write(passwords, f"*:*:*:*:{escaped}\n")
    accounts = private / "auth.ini"
    _write(
        accounts,
        _AUTH.format(permission=settings.permission, database=DATABASE, cache_s=_AUTH_CACHE_S),
    )
    return {
        "PGPASSFILE": str(passwords),
        "MLFLOW_AUTH_CONFIG_PATH": str(accounts),
        "MLFLOW_AUTH_ADMIN_PASSWORD": settings.secret("admin_password"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": settings.secret("session_key"),
        # Without it MLflow starts a dozen processes and 2 GB of job runners that a registry has no use for.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def _write(path: Path, text: str) -> None:
    """libpq ignores a file of passwords that others can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def serve(settings: Settings) -> NoReturn:
    """Becomes the server. Ends the program where the database has another MLflow's schema.

    MLflow itself refuses some of those and migrates others, without a backup and without being asked.
    """
    os.environ.update(environment(settings, Path(tempfile.mkdtemp(prefix="registry-"))))
    found, wanted = revisions()
    if found not in (None, wanted):
        raise SystemExit(
            f"the database has schema {found}, this MLflow {wanted}: `make registry-upgrade` backs it up and "
            "upgrades it; if it is the newer of the two, start the newer version again"
        )
    arguments = command(settings)
    os.execv(arguments[0], arguments)


def upgrade(settings: Settings) -> None:
    """Brings runs' and accounts' tables to this MLflow's schema; changes nothing where they have it."""
    with tempfile.TemporaryDirectory() as private:
        os.environ.update(environment(settings, Path(private)))
        before, _ = revisions()
        for arguments in (
            ["mlflow", "db", "upgrade", DATABASE],
            ["mlflow.server.auth", "db", "upgrade", "--url", DATABASE],
        ):
            subprocess.run([sys.executable, "-m", *arguments], check=True)
        after, _ = revisions()
        print(f"schema {before or 'none'} -> {after}")


def revisions() -> tuple[str | None, str]:
    """The schema's revision in the database, None for an empty one, and the one that this MLflow needs."""
    import psycopg2  # type: ignore[import-untyped]  # only in the server's own environment
    from alembic.script import ScriptDirectory

    spec = importlib.util.find_spec("mlflow")  # does not import it: that takes seconds
    assert spec is not None
    assert spec.origin is not None
    head = ScriptDirectory(str(Path(spec.origin).parent / "store" / "db_migrations")).get_current_head()
    assert head is not None
    try:
        connection = psycopg2.connect("")
    except psycopg2.OperationalError as error:
        raise SystemExit(f"the database cannot be reached: {str(error).strip()}") from None
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT to_regclass('alembic_version')")
            if cursor.fetchone() == (None,):
                return None, head
            cursor.execute("SELECT version_num FROM alembic_version")
            row = cursor.fetchone()
            return (row[0] if row else None), head
    finally:
        connection.close()


def health(settings: Settings) -> int:
    """0 if the server answers an API path the way it must: it looks the account up and refuses it.

    /health says yes even where every request is refused for its Host header, or the database is gone.
    """
    request = urllib.request.Request(
        f"http://127.0.0.1:{settings.port}/api/2.0/mlflow/experiments/search?max_results=1"
    )
    # No account has this name, so that asking costs a look into the database and no PBKDF2.
    pair = base64.b64encode(f"health check:{secrets.token_hex(8)}".encode()).decode()
    request.add_header("Authorization", f"Basic {pair}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError as error:
        print(f"no answer: {error}", file=sys.stderr)
        return 1
    if status == 401:
        return 0
    print(f"status {status} in place of 401", file=sys.stderr)
    return 1


def save(settings: Settings) -> None:
    """Writes the artifacts' folder as an archive. In a bucket, artifacts are the bucket's to keep."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        archive.add(_folder(settings), arcname=".")


def load(settings: Settings) -> None:
    """Reads such an archive into the artifacts' folder, which must be empty."""
    folder = _folder(settings)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: a backup is only restored into an empty registry")
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            # Python 3.11 has the filter that does this only since its fourth patch.
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                raise SystemExit(f"{member.name!r} in the archive is none of ours")
            archive.extract(member, folder)


def _folder(settings: Settings) -> Path:
    if "://" in settings.artifacts:
        raise SystemExit(f"artifacts are in {settings.artifacts}: back them up there")
    return Path(settings.artifacts)


def main() -> int:
    """Runs the command that is named."""
    commands = {x.__name__: x for x in (serve, upgrade, health, save, load)}
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in commands:
        print(f"usage: server.py {'|'.join(commands)}", file=sys.stderr)
        return 2
    return commands[name](Settings.of(os.environ)) or 0


if __name__ == "__main__":
    sys.exit(main())
