"""How the registry is reached: which MLflow store, with what patience, and what a failure says."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from filelock import FileLock, Timeout

from ..errors import FAILING, InputError, KernelmarkError, first_line
from ..store.home import Home

EXPERIMENT = "kernelmark"

_QUIET = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# MLflow's own patience with a server that is down is 250 s, with a silent one 1,211 s. First a short
# look whether anybody answers; then longer, since an artifact can take a server some time to store, and one that
# many write to at once some time to answer.
_FIRST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
_LATER = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
_LOCK_S = 600.0  # another ingest of a full plan takes well under a minute
_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql")


class StoreError(KernelmarkError):
    """The registry cannot be reached or written. The journals hold everything, so nothing is lost."""

    exit_code = 5

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}\nNothing is lost: every result is in its journal. `kernelmark sync` records it later."
        )


class RefusedError(StoreError):
    """The registry will not have us: a wrong password, name or address, or a folder that is closed to us. The user
    can mend that.
    """

    exit_code = 2


@dataclass(frozen=True)
class Connection:
    """An open MLflow store and the one experiment that is used of it."""

    client: Any
    uri: str
    experiment_id: str
    lock: Path
    database: Path | None = None
    """The file, where it is SQLite's."""

    def address(self, fragment: str) -> str:
        """The UI's address of a fragment; only that where no server runs."""
        server = shown(self.uri).rstrip("/") + "/" if self.uri.startswith("http") else ""
        return f"{server}{fragment}"

    def link(self, search: str) -> str:
        """The UI's address of the rows that a search finds."""
        # Without the workflow the UI opens at its other half, for language models.
        query = f"workflowType=machine_learning&compareRunsMode=CHART&searchFilter={quote(search)}"
        return self.address(f"#/experiments/{self.experiment_id}/runs?{query}")

    def upload(self, run_id: str, name: str, data: bytes) -> None:
        """Puts a file under a run; an older one of that name is replaced."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            self.client.log_artifact(run_id, str(path))

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Turns what goes wrong on the way to the store into a `StoreError`."""
        with reachable(self.uri, _LATER):
            yield


def resolve(uri: str | None, home: Home) -> str:
    """The URI that counts: given, else MLFLOW_TRACKING_URI, else SQLite in the home."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or _sqlite(home.database.resolve())
    if uri.split(":")[0].split("+")[0] not in _SCHEMES:
        raise InputError(
            f"MLflow URI {shown(uri)!r} is of no use here; use http(s)://SERVER, sqlite:///FILE.db or "
            "postgresql://…, or unset MLFLOW_TRACKING_URI for the registry in KERNELMARK_HOME"
        )
    return uri


def connect(uri: str | None, home: Home) -> Connection:
    """Opens a store and makes its experiment, and a fresh SQLite file, if they are not there."""
    uri = resolve(uri, home)
    database = _database(uri)
    lock = database.with_name(f"{database.name}.lock") if database else home.folder / "sync.lock"
    artifacts = None if uri.startswith("http") else (database.parent if database else home.folder) / "artifacts"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        # Two processes that set up one fresh SQLite file at once destroy each other's migrations.
        with locked(lock), reachable(uri, _FIRST):
            if database is not None:
                if not _made(database, ours=database == home.database.resolve()):
                    _make(database)
                _try(database)
            client = _client(uri)
            found = _experiment(client, os.environ.get("KERNELMARK_EXPERIMENT") or EXPERIMENT, artifacts)
            if database is not None and artifacts is not None:
                _follow(database, client.get_experiment(found).artifact_location, artifacts)
    except OSError as error:
        kind = StoreError if error.errno is None or error.errno in FAILING else RefusedError
        raise kind(
            f"the registry at {shown(uri)} cannot be opened: {error.strerror or error}. Choose another place with "
            "KERNELMARK_HOME or MLFLOW_TRACKING_URI."
        ) from None
    except sqlite3.Error as error:
        raise StoreError(f"the registry at {shown(uri)} cannot be opened: {error}") from None
    return Connection(client, uri, found, lock, database)


@contextmanager
def reachable(uri: str, patience: Mapping[str, str]) -> Iterator[None]:
    """Sets MLflow's environment for the time of a call, and names failures.

    What the user has set in the environment stays.
    """
    ours = {name: x for name, x in {**_QUIET, **patience}.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"the registry at {shown(uri)} failed: {error}") from error
    except ModuleNotFoundError as error:  # SQLAlchemy imports a database's driver when it is asked for one
        raise RefusedError(
            f"the registry at {shown(uri)} needs the Python module {error.name!r}, which is not installed here: "
            "install it, or name a driver that is, as in postgresql+psycopg2://…"
        ) from error
    except Exception as error:
        if not type(error).__module__.startswith(("mlflow", "requests", "urllib3", "sqlalchemy")):
            if not _within_mlflow(error):
                raise
            raise StoreError(
                f"the registry at {shown(uri)} does not answer as MLflow does: {type(error).__name__}: "
                f"{_short(error, uri)}"
            ) from error
        if refusal := _refusal(error, uri):
            raise RefusedError(refusal) from error
        raise StoreError(f"the registry at {shown(uri)} failed: {_short(error, uri)}") from error
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes of this machine out; for minutes, not for ever."""
    try:
        with FileLock(path).acquire(timeout=_LOCK_S):
            yield
    except Timeout:
        raise StoreError(f"another kernelmark has held {path} for {_LOCK_S / 60:.0f} minutes") from None


def shown(uri: str) -> str:
    """A URI without user name and password. It hides too much rather than too little: a password may hold @ and /,
    where its user did not quote them.
    """
    return re.sub(r"//[^\s\"'?#]*@", "//", uri)


def _client(uri: str) -> Any:
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise StoreError(
            "MLflow is not installed here, so there is no registry: pip install 'kernelmark[registry]'."
        ) from None
    # "INFO alembic: Running upgrade …", fifty times for a fresh file, is no news to a user.
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _experiment(client: Any, name: str, artifacts: Path | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            where = artifacts.resolve().as_uri() if artifacts else None
            # Without the tag the UI asks what kind of experiment this is, in front of the charts.
            tags = {"mlflow.experimentKind": "custom_model_development"}
            return str(client.create_experiment(name, where, tags))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)  # somebody was quicker
    if found.lifecycle_stage == "deleted":
        raise StoreError(
            f"experiment {name!r} was deleted in MLflow: restore it, or set KERNELMARK_EXPERIMENT to another"
        )
    return str(found.experiment_id)


def _made(database: Path, ours: bool) -> bool:
    """Whether somebody finished making a SQLite file. Of `ours` one without any experiment, MLflow's last step,
    was left half made; what somebody else's file holds is not asked.
    """
    if not database.exists() or (database.is_file() and not database.stat().st_size):
        return False
    if not ours:
        return True
    with closing(sqlite3.connect(database)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
            return False
        return connection.execute("SELECT 1 FROM experiments").fetchone() is not None


def _make(database: Path) -> None:
    """Makes a fresh SQLite file beside and puts it there whole. Of MLflow's fifty migrations a Ctrl-C or a full
    disk would leave some, and MLflow never gets past those again.
    """
    new = database.with_name(f"{database.name}.new")
    for path in (new, database):  # what was left of it, and the journals that SQLite would play back
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
    new.unlink(missing_ok=True)
    try:
        _client(_sqlite(new.resolve())).search_experiments(max_results=1)
        new.replace(database)
    finally:
        new.unlink(missing_ok=True)


def _sqlite(database: Path) -> str:
    """The URI of a SQLite file."""
    return "sqlite:///" + str(database).replace("%", "%25").replace("?", "%3F")


def _try(database: Path) -> None:
    """Opens a SQLite file for writing: MLflow would try for 100 s to open what cannot be opened."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()


def _follow(database: Path, old: str, artifacts: Path) -> None:
    """Makes the artifacts' addresses follow a home that was moved or copied.

    MLflow writes absolute ones and has no call to change them; new artifacts would go to the old place.
    """
    new = artifacts.resolve().as_uri()
    if old == new:
        return
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} = ? OR {column} LIKE ?",
                (new, len(old) + 1, old, f"{old}/%"),
            )


def _database(uri: str) -> Path | None:
    """The file of a SQLite URI."""
    if not uri.startswith("sqlite"):
        return None
    name = uri.partition(":///")[2].partition("?")[0]
    if not name or name == ":memory:":
        raise InputError(f"MLflow URI {uri!r} names no file, so nothing would be kept; use sqlite:///FILE.db")
    return Path(unquote(name))


def _refusal(error: Exception, uri: str) -> str | None:
    """What to do about a server that refuses; None for every other failure."""
    code = getattr(error, "error_code", None)
    if code == "UNAUTHENTICATED":
        return (
            f"the registry at {shown(uri)} refused the user name and password: check MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD"
        )
    if code != "PERMISSION_DENIED":
        return None
    if "Invalid Host header" in str(error):
        return (
            f"the server at {shown(uri)} does not go by this name: use one that it knows, or have its "
            "administrator add this one to KERNELMARK_REGISTRY_HOSTS"
        )
    return f"this account may not do that in the registry at {shown(uri)}: have its administrator grant it"


def _within_mlflow(error: Exception) -> bool:
    """Whether MLflow's own code raised it, as it does for an answer whose fields have other types."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return str(module).startswith(("mlflow.", "google.protobuf", "json"))


def _short(error: Exception, uri: str) -> str:
    """The cause in one line, without credentials: MLflow quotes whole URIs, requests and SQL statements."""
    text = first_line(error, type(error).__name__).replace(uri, shown(uri))
    caused = re.search(r"Caused by \w+\(.*: (.+?)[\"')]*$", text)
    # The innermost of nested exceptions says what happened: ('Connection aborted.', RemoteDisconnected('…')).
    caused = caused or re.search(r"Caused by \w+\(.*'([^']+)'\)+$", text)
    return shown(caused[1] if caused else text)[:500]
