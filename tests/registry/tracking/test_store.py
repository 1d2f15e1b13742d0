"""The MLflow store, against real SQLite and a real server: nothing twice, nothing lost, nobody waits long."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal, parse
from kernelmark.registry.store.record import Request
from kernelmark.registry.tracking import bulk
from kernelmark.registry.tracking.connection import Connection, RefusedError, reachable, shown
from kernelmark.registry.tracking.entries import Entry
from kernelmark.registry.tracking.store import Store, StoreError, sync

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
# MLflow 3.17.2 calls what SQLAlchemy 2.1 deprecates: not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

RUN = "20261120-120000-abcd"
SYNC = """
import sys
from pathlib import Path
from kernelmark.registry.store.home import Home
from kernelmark.registry.tracking import bulk
from kernelmark.registry.tracking.entries import Entry
from kernelmark.registry.tracking.store import sync
print(sync(Home(Path(sys.argv[1])), ["latest"], sys.argv[2] if len(sys.argv) > 2 else None))
"""
SLOW = "from mlflow import MlflowClient; import time; old = MlflowClient.set_terminated\n" + (
    "MlflowClient.set_terminated = lambda *a, **k: (time.sleep(0.05), old(*a, **k))[1]\n"
    "from kernelmark.registry.tracking import bulk; bulk.REVISION = 'another'\n"
)


@pytest.fixture
def home(tmp_path: Path, fresh_database: Path) -> Home:
    """A home with an initialised registry."""
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    shutil.copy(fresh_database, home.database)
    return home


def stored(uri: str, run: str = RUN) -> list[Any]:
    """All MLflow runs of one of our runs that are not deleted."""
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("kernelmark")
    return list(client.search_runs([experiment.experiment_id], f"tags.invocation = '{run}'", max_results=5000))


def at(home: Home) -> str:
    return f"sqlite:///{home.database}"


def assert_once(runs: list[Any], rows: int) -> None:
    """Each row exactly once and finished, and one summary."""
    assert Counter(x.data.tags["identity"] for x in runs).most_common(1)[0][1] == 1
    assert len(runs) == rows + 1
    assert {x.info.status for x in runs} <= {"FINISHED", "FAILED"}


def start(home: Home, *arguments: str, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", before + SYNC, str(home.folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_row_becomes_one_flat_run(home: Home, make_journal: Callable[..., Journal], tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    report.write_text("<p>a report</p>")
    steps: list[tuple[int, int]] = []
    journal = make_journal(wrong="torch", cases=1)
    done = Store.open(None, home).ingest(journal, report, lambda x, y: steps.append((x, y)))
    assert (done.run, done.created, done.updated, done.skipped) == (RUN, 2, 0, 0)
    assert steps == [(2, 2)]
    assert done.deep_link.startswith("#/experiments/")
    assert RUN in done.deep_link
    by_name = {x.info.run_name: x for x in stored(at(home))}
    ours = by_name["kernelmark B4-S256-D4096-bf16-forward rms_norm"]
    assert ours.data.tags["operator"] == "rms_norm"
    assert ours.data.tags["comparability_key"] == "00aa11bb22cc33dd"
    assert ours.data.params == {"B": "4", "S": "256", "D": "4096"}
    assert ours.data.metrics["latency/median_ms"] == pytest.approx(16777216 / 3e9, rel=0.01)
    assert ours.info.status == "FINISHED"
    assert not {"mlflow.user", "mlflow.source.name"} & ours.data.tags.keys()
    wrong = by_name["torch B4-S256-D4096-bf16-forward rms_norm"]
    assert wrong.info.status == "FAILED"
    assert "latency/median_ms" not in wrong.data.metrics
    assert "0.3" in wrong.data.tags["reason"]
    client = mlflow.MlflowClient(tracking_uri=at(home))
    summary = by_name[f"run {RUN}"].info.run_id
    files = {x.path for x in client.list_artifacts(summary)}
    assert files == {f"{RUN}.jsonl.gz", "fingerprint.json", "report.html"}
    kept = next((home.folder / "artifacts").rglob(f"{RUN}.jsonl.gz"))
    assert parse(gzip.decompress(kept.read_bytes())) == journal


def test_ingesting_again_changes_nothing(home: Home, make_journal: Callable[..., Journal]) -> None:
    store, journal = Store.open(None, home), make_journal()
    store.ingest(journal)
    before = {x.info.run_id for x in stored(at(home))}
    again = store.ingest(journal)
    assert (again.created, again.updated, again.skipped) == (0, 0, 4)
    assert {x.info.run_id for x in stored(at(home))} == before
    assert store.newest() == RUN


def test_the_newest_run_is_one_with_something_to_show(home: Home, make_journal: Callable[..., Journal]) -> None:
    store, whole = Store.open(None, home), make_journal()
    store.ingest(whole)
    nothing = [msgspec.structs.replace(x, status="error", measurement=None, reason="no") for x in whole.records]
    header = msgspec.structs.replace(whole.header, run="29990101-000000-ffff", created="2999-01-01T00:00:00Z")
    store.ingest(replace(whole, header=header, records=tuple(nothing)))
    assert store.newest() == RUN
    with pytest.raises(
        InputError, match="run 29990101-000000-ffff has no row with a value .*kernelmark show 2999"
    ):
        store.saved_view({"invocation": header.run})


def test_a_grown_journal_replaces_and_a_shorter_one_does_not(
    home: Home, make_journal: Callable[..., Journal]
) -> None:
    whole = make_journal(replicates=2)
    killed = replace(whole, records=whole.records[:5], footers=())
    store = Store.open(None, home)
    assert store.ingest(killed).created == 4
    grown = store.ingest(whole)
    assert (grown.created, grown.updated) == (0, 4)
    assert_once(stored(at(home)), 4)
    back = store.ingest(killed)
    assert (back.created, back.updated, back.skipped) == (0, 0, 4)
    assert_once(stored(at(home)), 4)


@pytest.mark.parametrize("crowd", [False, True])
def test_duplicates_and_leftovers_are_tidied(
    crowd: bool, home: Home, make_journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a crowd others delete the same at once: then it is not asked for again."""
    monkeypatch.setattr("kernelmark.registry.tracking.store._FEW", 3)
    store, journal = Store.open(None, home), make_journal()
    store.ingest(journal)
    client = mlflow.MlflowClient(tracking_uri=at(home))
    kept, asked = {x.info.run_id for x in stored(at(home))}, []
    delete = mlflow.MlflowClient.delete_run

    def deleted(self: Any, run: str) -> None:
        asked.append(run)
        for x in {x.info.run_id for x in stored(at(home))} - kept if crowd else {run}:
            delete(self, x)

    monkeypatch.setattr(mlflow.MlflowClient, "delete_run", deleted)
    for found in stored(at(home)):
        for end in ("FINISHED", None):  # what a second writer made, and what a killed one left
            twin = client.create_run(found.info.experiment_id, tags=found.data.tags).info.run_id
            if end:
                client.set_terminated(twin, end)
    assert store.complete() == {}
    store.ingest(journal)
    assert_once(stored(at(home)), 4)
    assert store.complete().keys() == {RUN}
    assert len(asked) == (3 if crowd else 10)


def test_what_a_killed_writer_left_beside_a_recorded_row_is_seen_to(
    home: Home, make_journal: Callable[..., Journal], write: Callable[[Journal, Path], Path]
) -> None:
    journal = make_journal(cases=1)
    write(journal, home.journal(RUN))
    Store.open(None, home).ingest(journal)
    client = mlflow.MlflowClient(tracking_uri=at(home))
    row = next(x for x in stored(at(home)) if x.data.tags["kind"] == "row")
    while True:  # half of all ids stand below the finished one's, and those are deleted anyway
        left = client.create_run(row.info.experiment_id, tags=row.data.tags).info.run_id
        if left > row.info.run_id:
            break
    done = sync(home)  # the summary says complete; the row does not
    assert done.complete == ()
    assert (done.ingested[0].created, done.ingested[0].updated, done.ingested[0].skipped) == (0, 0, 2)
    runs = stored(at(home))
    assert_once(runs, 2)
    assert left in {x.info.run_id for x in runs}
    assert client.get_run(left).data.metrics == row.data.metrics
    assert sync(home).complete == (RUN,)


def test_a_writer_that_was_overtaken_gives_way(
    home: Home, make_journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "REVISION", "another")
    store, create = Store.open(None, home), mlflow.MlflowClient.create_run

    def overtaken(self: Any, *arguments: Any, **options: Any) -> Any:
        run = create(self, *arguments, **options)
        self.delete_run(run.info.run_id)
        return run

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", overtaken)
    done = store.ingest(make_journal(cases=1))
    assert (done.created, done.skipped) == (0, 2)


def test_two_processes_with_one_fresh_database(
    tmp_path: Path,
    make_journal: Callable[..., Journal],
    write: Callable[[Journal, Path], Path],
) -> None:
    home = Home(tmp_path / "shared")
    write(make_journal(cases=6), home.journal(RUN))
    for process in [start(home), start(home)]:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    assert_once(stored(at(home)), 12)


def test_a_registry_that_was_left_half_made_is_made_anew(
    home: Home, make_journal: Callable[..., Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(home.database)) as half, half:  # as a Ctrl-C among MLflow's migrations leaves it
        half.execute("DELETE FROM experiments")
        half.execute("DROP TABLE datasets")

    def interrupted(uri: str) -> Any:
        home.database.with_name(f"{home.database.name}.new").write_text("some of it")
        raise KeyboardInterrupt

    before = home.database.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("kernelmark.registry.tracking.connection._client", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Store.open(None, home)
    assert home.database.read_bytes() == before
    assert Store.open(None, home).ingest(make_journal(cases=1)).created == 2
    assert {x.name for x in home.folder.glob(f"{home.database.name}*")} == {"registry.db", "registry.db.lock"}


def test_a_database_of_somebody_else_is_never_made_anew(home: Home, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.db"
    with closing(sqlite3.connect(theirs)) as kept, kept:
        kept.execute("CREATE TABLE experiments (theirs)")
    with contextlib.suppress(StoreError):
        Store.open(f"sqlite:///{theirs}", home)
    with closing(sqlite3.connect(theirs)) as kept:
        assert ("theirs",) in kept.execute("SELECT name FROM pragma_table_info('experiments')").fetchall()


def test_two_machines_with_one_server(
    server: str,
    tmp_path: Path,
    make_journal: Callable[..., Journal],
    write: Callable[[Journal, Path], Path],
) -> None:
    homes = [Home(tmp_path / x) for x in ("one", "two")]
    for home in homes:  # homes of their own: no lock in common
        write(make_journal(cases=6), home.journal(RUN))
    said = []
    for process in [start(x, server) for x in homes]:
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        said.append(output)
    assert_once(stored(server), 12)
    home = homes[0]
    link = Store.open(server, home).deep_link(RUN)
    assert link.startswith(f"{server}/#/experiments/")
    assert sync(home, uri=server).complete == (RUN,)


@pytest.mark.parametrize("where", ["sqlite", "server"])
def test_killed_in_the_middle_then_synced(
    where: str,
    request: pytest.FixtureRequest,
    home: Home,
    make_journal: Callable[..., Journal],
    write: Callable[[Journal, Path], Path],
) -> None:
    run = f"20261120-130000-{where}"
    uri = request.getfixturevalue("server") if where == "server" else at(home)
    write(make_journal(run, cases=10), home.journal(run))
    process = start(home, uri, before=SLOW)
    end = time.monotonic() + 60
    while len(stored(uri, run)) < 5 and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    partly = stored(uri, run)
    assert 5 <= len(partly) < 21, "killed too late to show anything"
    done = sync(home, uri=uri)
    assert done.ingested[0].created + done.ingested[0].skipped == 20
    assert done.ingested[0].skipped >= 3
    assert_once(stored(uri, run), 20)


def test_a_bad_journal_does_not_keep_the_others_out(
    home: Home, make_journal: Callable[..., Journal], write: Callable[[Journal, Path], Path]
) -> None:
    torn = write(make_journal("20261120-1-torn"), home.journal("20261120-1-torn"))
    torn.write_bytes(torn.read_bytes()[:-30])
    bad = write(make_journal("20261120-2-bad"), home.journal("20261120-2-bad"))
    lines = bad.read_bytes().splitlines()
    bad.write_bytes(b"\n".join([*lines[:3], b'{"kind": "nonsense"}', *lines[3:]]))
    newer = write(make_journal("20261120-3-newer"), home.journal("20261120-3-newer"))
    newer.write_bytes(newer.read_bytes().replace(b'"schema_version":2', b'"schema_version":99,"more":1'))
    done = sync(home)
    assert [x.run for x in done.ingested] == ["20261120-1-torn"]
    assert "line 4" in done.unreadable["20261120-2-bad.jsonl"]
    assert "99" in done.unreadable["20261120-3-newer.jsonl"]


def test_a_verification_is_kept_with_the_run_that_it_verifies(
    home: Home, make_journal: Callable[..., Journal], write: Callable[[Journal, Path], Path]
) -> None:
    """Whichever of both is recorded first, and once."""
    again = make_journal("20261121-again", cases=1)
    again = replace(
        again, header=msgspec.structs.replace(again.header, request=Request(verifies="20261120-theirs"))
    )
    write(again, home.journal("20261121-again"))
    sync(home)
    write(make_journal("20261120-theirs", cases=1), home.journal("20261120-theirs"))
    for _ in range(2):
        sync(home, ["20261120-theirs", "20261121-again"])
    (theirs,) = (x for x in stored(at(home), "20261120-theirs") if x.data.tags["kind"] == "summary")
    files = mlflow.MlflowClient(tracking_uri=at(home)).list_artifacts(theirs.info.run_id)
    assert {x.path for x in files} == {"20261120-theirs.jsonl.gz", "20261121-again.jsonl.gz", "fingerprint.json"}
    assert {x.data.tags.get("verifies") for x in stored(at(home), "20261121-again")} == {"20261120-theirs"}


def test_a_moved_home_takes_its_artifacts_along(home: Home, make_journal: Callable[..., Journal]) -> None:
    Store.open(None, home).ingest(make_journal(cases=1))
    moved = Home(home.folder.with_name("moved"))
    home.folder.rename(moved.folder)
    Store.open(None, moved).ingest(make_journal("20261121-120000-moved", cases=1))
    assert not home.folder.exists()
    assert len(list((moved.folder / "artifacts").rglob("*.jsonl.gz"))) == 2
    locations = {x.info.artifact_uri.split("/artifacts/")[0] for x in stored(at(moved))}
    assert locations == {moved.folder.as_uri()}


def test_a_home_of_an_odd_name(home: Home, make_journal: Callable[..., Journal]) -> None:
    odd = Home(home.folder.with_name("a b#ü"))
    home.folder.rename(odd.folder)
    Store.open(None, odd).ingest(make_journal(cases=1))
    assert [x.name for x in odd.folder.parent.iterdir()] == [odd.folder.name]
    assert len(list((odd.folder / "artifacts").rglob("*.jsonl.gz"))) == 1


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("http://ada:secret@host:5000/a", "http://host:5000/a"),
        ("http://ada:se@cret@host:5000", "http://host:5000"),
        ("http://ada:se/cret@host:5000", "http://host:5000"),
        ("http://host:5000/a", "http://host:5000/a"),
    ],
)
def test_a_password_is_not_shown(uri: str, said: str) -> None:
    assert shown(uri) == said


def test_a_database_whose_driver_is_missing_is_said() -> None:
    with pytest.raises(RefusedError, match="needs the Python module 'nosuch'"), reachable("postgresql://x", {}):
        raise ModuleNotFoundError("No module named 'nosuch'", name="nosuch")


def test_a_server_that_is_down_costs_seconds(home: Home, free_port: Callable[[], int]) -> None:
    start = time.monotonic()
    with pytest.raises(StoreError, match=r"(?s)refused\nNothing is lost.*kernelmark sync"):
        Store.open(f"http://someone:secret@127.0.0.1:{free_port()}", home)
    assert time.monotonic() - start < 5


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    kept.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for x in kept:
            x.close()


def test_a_silent_server_costs_seconds(home: Home, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    with pytest.raises(StoreError, match="Nothing is lost") as caught:
        Store.open(silent.replace("//", "//someone:secret@"), home)
    assert time.monotonic() - start < 12
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")  # what the user sets is kept
    start = time.monotonic()
    with pytest.raises(StoreError):
        Store.open(silent, home)
    assert time.monotonic() - start < 4
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "1"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


@pytest.mark.parametrize("body", ["[]", "5", "null", '{"experiment": {"experiment_id": {}, "tags": 7}}'])
def test_a_server_that_answers_json_of_other_types(home: Home, body: str) -> None:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *told: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            with pytest.raises(StoreError, match=r"the registry at .* (failed|does not answer)"):
                Store.open(f"http://127.0.0.1:{server.server_port}", home)
        finally:
            server.shutdown()
            thread.join()


def test_uris_of_no_use(home: Home, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sqlite:///"):
        Store.open("./mlruns", home)
    with pytest.raises(InputError, match="names no file"):
        Store.open("sqlite://", home)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match=r"cannot be opened: File exists\. Choose another place") as closed:
        Store.open(f"sqlite:///{tmp_path}/file/registry.db", home)
    assert closed.value.exit_code == 2
    (tmp_path / "text.db").write_text("this is no database, and long enough to be told from one" * 20)
    with pytest.raises(StoreError, match="not a database"):
        Store.open(f"sqlite:///{tmp_path}/text.db", home)
    (tmp_path / "folder.db").mkdir()
    start = time.monotonic()
    with pytest.raises(StoreError, match="unable to open"):
        Store.open(f"sqlite:///{tmp_path}/folder.db", home)
    assert time.monotonic() - start < 3


def test_a_deleted_experiment_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELMARK_EXPERIMENT", "mine")
    Store.open(None, home)
    client = mlflow.MlflowClient(tracking_uri=at(home))
    client.delete_experiment(client.get_experiment_by_name("mine").experiment_id)
    with pytest.raises(StoreError, match="'mine' was deleted"):
        Store.open(None, home)


def test_without_mlflow(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(StoreError, match="MLflow is not installed"):
        Store.open(None, home)


def test_a_foreign_header_is_refused(home: Home, make_journal: Callable[..., Journal]) -> None:
    store = Store.open(None, home)
    with pytest.raises(InputError, match="has not the form of one"):
        store.ingest(make_journal("x' or '1'='1"))


def test_importing_the_store_does_not_import_mlflow() -> None:
    modules = "kernelmark.registry.tracking.store, kernelmark.registry.tracking.ui, kernelmark.suite.cli.transfer"
    code = f"import sys, {modules}; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_many_at_once_writes_what_the_client_would(
    home: Home, tmp_path: Path, fresh_database: Path, make_journal: Callable[..., Journal], monkeypatch: Any
) -> None:
    journal = make_journal(wrong="torch")
    Store.open(None, home).ingest(journal)
    other = Home(tmp_path / "other")
    other.folder.mkdir()
    shutil.copy(fresh_database, other.database)
    monkeypatch.setattr(bulk, "REVISION", "another")
    slow = Store.open(None, other)
    assert slow._bulk is None
    slow.ingest(journal)
    assert tables(home) == tables(other)


def tables(home: Home) -> dict[str, list[tuple[Any, ...]]]:
    """What was written, runs by their names in place of their ids."""
    out = {}
    with closing(sqlite3.connect(home.database)) as connection:
        names = dict(connection.execute("SELECT run_uuid, name FROM runs"))
        for table in ("runs", "tags", "params", "metrics", "latest_metrics", "inputs", "logged_models"):
            cursor = connection.execute(f"SELECT * FROM {table}")
            columns = [x[0] for x in cursor.description]
            rows = [
                tuple(
                    names.get(x, x) if y == "run_uuid" else "" if y == "artifact_uri" else x
                    for x, y in zip(row, columns, strict=True)
                )
                for row in cursor
            ]
            out[table] = sorted(rows, key=repr)
    return out


def test_names_that_mlflow_might_refuse_are_its_business(home: Home) -> None:
    found = Store.open(None, home)._bulk
    assert found is not None
    entry = Entry("a", "a name", "00", 0, 0, params={"B": "4"}, metrics={"latency/median_ms": 1.0})
    assert found.takes(entry)
    assert not found.takes(replace(entry, params={"B": ""}))
    assert not found.takes(replace(entry, metrics={"../odd": 1.0}))
    assert not found.takes(replace(entry, tags={"naïve": "x"}))
    assert not found.takes(replace(entry, name="x" * 300))


def test_a_database_that_fails_once_it_is_open_is_said(tmp_path: Path) -> None:
    damaged = tmp_path / "text.db"
    damaged.write_text("this is no database, and long enough to be told from one" * 20)
    with pytest.raises(StoreError, match="not a database.*\n.*Nothing is lost"):
        Store(Connection(None, f"sqlite:///{damaged}", "1", tmp_path / "lock", damaged))
