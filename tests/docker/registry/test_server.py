"""The registry for a team, on a real PostgreSQL: who gets in, who does not, and what survives what."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kernelmark.registry.store.journal import read

pytestmark = pytest.mark.docker

WRITERS = int(os.environ.get("WRITERS", "4"))
CASES = int(os.environ.get("CASES", "120"))
"""How many write at once, and the cases of each of their two runs; `make test-load` takes more of both."""
SHARED = 10
"""Cases of a run that all of them have. Each writes it whole, and tidies up after the others."""
COUNT = 2 * SHARED + 4 * WRITERS * CASES
"""Rows in all: of each case two."""

SECRETS = ("da:ta", "admin%(", "session-key-secret")
SEARCH = "/api/2.0/mlflow/experiments/search?max_results=1"
ROWS = """
SELECT invocation.value, name.value, implementation.value, runs.status, metric.value
FROM runs
JOIN tags kind ON kind.run_uuid = runs.run_uuid AND kind.key = 'kind' AND kind.value = 'row'
JOIN tags invocation ON invocation.run_uuid = runs.run_uuid AND invocation.key = 'invocation'
JOIN tags name ON name.run_uuid = runs.run_uuid AND name.key = 'case'
JOIN tags implementation ON implementation.run_uuid = runs.run_uuid AND implementation.key = 'implementation'
LEFT JOIN latest_metrics metric ON metric.run_uuid = runs.run_uuid AND metric.key = 'latency/median_ms'
WHERE runs.lifecycle_stage = 'active'
"""
WHOLE = """
SELECT count(*)
FROM runs
JOIN tags kind ON kind.run_uuid = runs.run_uuid AND kind.key = 'kind' AND kind.value = 'row'
WHERE runs.lifecycle_stage = 'active' AND runs.status = 'FINISHED'
"""
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
# What MLflow made of an empty database in early 2025, and a run that was recorded there.
OLD_REVISION = "6953534de441"
OLD_SCHEMA = f"""
import mlflow.store.db.utils as db
import sqlalchemy
from alembic.command import upgrade
from mlflow.store.tracking.dbmodels.initial_models import Base
engine = sqlalchemy.create_engine("postgresql+psycopg2://")
Base.metadata.create_all(engine)
config = db._get_alembic_config("postgresql+psycopg2://")
with engine.begin() as connection:
    config.attributes["connection"] = connection
    upgrade(config, "{OLD_REVISION}")
"""
OLD_RUN = """
INSERT INTO experiments (experiment_id, name, artifact_location, lifecycle_stage)
VALUES (1, 'kernelmark', 'mlflow-artifacts:/1', 'active');
INSERT INTO runs (run_uuid, name, source_type, user_id, status, start_time, lifecycle_stage, artifact_uri,
experiment_id) VALUES ('0123456789abcdef0123456789abcdef', 'old', 'LOCAL', 'unknown',
'FINISHED', 1, 'active', 'mlflow-artifacts:/1/a', 1);
INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid)
VALUES ('latency/median_ms', 0.25, 1, 0, false, '0123456789abcdef0123456789abcdef');
INSERT INTO tags (key, value, run_uuid) VALUES ('kind', 'row', '0123456789abcdef0123456789abcdef');
"""
READ = """
from mlflow import MlflowClient
run = MlflowClient("postgresql+psycopg2://").get_run("0123456789abcdef0123456789abcdef")
print(run.data.tags["kind"], run.data.metrics["latency/median_ms"], run.info.status)
"""


@dataclass
class Team:
    """Members of a team after their server was killed under them, and what each was told."""

    registry: Any
    members: list[Any]
    wanted: dict[tuple[str, str, str], float]
    partly: int
    killed: list[tuple[int, str]]
    synced: list[tuple[int, str, str]]


def expected(journals: list[Path]) -> dict[tuple[str, str, str], float]:
    """Each row's median, by what identifies it."""
    out = {}
    for journal in map(read, journals):
        for x in journal.records:
            assert x.measurement is not None
            out[journal.header.run, x.case.name, x.implementation] = sorted(x.primary)[1]
    return out


def pace(seen: list[tuple[float, int]]) -> str:
    """What was written after the server was back, from seconds and rows in all: how fast, and how fast at the end,
    as a row may take longer the more there are."""
    (_, first), (seconds, last) = seen[0], seen[-1]
    since = min(seen, key=lambda x: abs(x[1] - (last - (last - first) / 4)))
    rate = (last - first) / seconds
    end = (last - since[1]) / (seconds - since[0])
    return (
        f"{last - first:,} of {last:,} rows by {WRITERS} writers in {seconds:.0f} s: {rate:.1f} a second, "
        f"of the last quarter {end:.1f}\n"
        f"extrapolated, not run: 200,000 rows at the last quarter's pace {200_000 / end / 3600:.1f} h"
    )


@pytest.fixture(scope="module")
def team(
    registry: Any,
    make_member: Callable[..., Any],
    journal_writer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Team:
    """2,000 rows by four writers at once, say; the server is killed in the middle and started again."""
    members, journals = [], []
    for k in range(WRITERS):
        home = tmp_path_factory.mktemp(f"member-{k}")
        # All begin with a run that they have in common: two members imported the same journal.
        journals += [
            journal_writer(home, "20261120-000000-shared", SHARED),
            journal_writer(home, f"20261120-000001-a{k}", CASES),
            journal_writer(home, f"20261120-000002-b{k}", CASES),
        ]
        members.append(make_member(registry, ("ada", "grace")[k % 2], home))
    # The second account of a name gave that name a new password: all of a name use the last one.
    for k, member in enumerate(members):
        last = members[WRITERS - 2 + k % 2]
        member.environment["MLFLOW_TRACKING_PASSWORD"] = last.environment["MLFLOW_TRACKING_PASSWORD"]
    wanted = expected(journals)

    def count() -> int:
        return int(registry.cluster.query(registry.database, WHOLE)[0][0])

    writers = [x.start("sync") for x in members]
    end = time.monotonic() + max(300, COUNT)
    while count() < COUNT // 4:
        assert time.monotonic() < end, registry.said()[-2000:]
        ended = [x for x in writers if x.poll() is not None]
        assert not ended, ended[0].communicate()[1][-500:]
        time.sleep(0.2)
    registry.end(signal.SIGKILL)
    killed = []
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        killed.append((writer.returncode, errors))
    partly = count()
    registry.start()
    begin = time.monotonic()
    writers = [x.start("sync", "--json") for x in members]
    seen, done = [(0.0, partly)], threading.Event()

    def look() -> None:
        while not done.wait(2):
            seen.append((time.monotonic() - begin, count()))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    synced = []
    for writer in writers:
        out, errors = writer.communicate(timeout=max(600, COUNT))
        synced.append((writer.returncode, out, errors))
    seconds = time.monotonic() - begin
    done.set()
    looking.join()
    print(pace([*seen, (seconds, count())]))
    return Team(registry, members, wanted, partly, killed, synced)


@pytest.mark.timeout(
    max(1200, 2 * COUNT)
)  # 2,000 rows take a minute on two idle cores, and several where they are not
def test_writers_and_a_server_that_is_killed(team: Team) -> None:
    assert len(team.wanted) == COUNT
    assert COUNT // 4 <= team.partly < COUNT, "killed too late to show anything"
    for code, errors in team.killed:
        assert code == 5, errors
        assert "failed: " in errors
        assert "Nothing is lost" in errors
        assert "kernelmark sync" in errors
    for code, _, errors in team.synced:
        assert code == 0, errors
    rows = team.registry.cluster.query(team.registry.database, ROWS)
    times = Counter((run, case, implementation) for run, case, implementation, _, _ in rows)
    assert times.most_common(1)[0][1] == 1, "a row stands there twice"
    assert times.keys() == team.wanted.keys()
    assert {status for _, _, _, status, _ in rows} == {"FINISHED"}
    stored = {(run, case, implementation): float(ms) for run, case, implementation, _, ms in rows}
    assert stored == pytest.approx(team.wanted)


def test_each_run_has_its_journal_once(team: Team) -> None:
    stored = list(team.registry.artifacts.rglob("*.jsonl.gz"))
    journals = {y.stem: y for x in team.members for y in (x.home / "journals").glob("*.jsonl")}
    assert {x.name for x in stored} == {f"{x}.jsonl.gz" for x in journals}
    for x in stored:
        assert gzip.decompress(x.read_bytes()) == journals[x.name.removesuffix(".jsonl.gz")].read_bytes()


def test_syncing_again_finds_everything_there(team: Team) -> None:
    for member in team.members[:2]:
        code, out, errors = member.run("sync")
        assert (code, out) == (0, "complete already: 3 runs\n"), errors


@pytest.mark.timeout(600)
def test_a_backup_gives_the_same_rows(
    team: Team, make_registry: Callable[..., Any], local: Callable[..., Any], admin: Any, tmp_path: Path
) -> None:
    registry, other = team.registry, make_registry("restored")
    path = admin.save(local(registry), tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [path]
    with admin.Backup(path) as whole:
        admin.load(local(other), whole)
    tables = [x for (x,) in registry.cluster.query(registry.database, TABLES)]
    assert [x for (x,) in registry.cluster.query(other.database, TABLES)] == tables
    assert {"runs", "metrics", "tags", "users"} <= set(tables)
    found = 0
    for table in tables:
        rows = f'SELECT "{table}"::text FROM "{table}" ORDER BY 1'
        before = registry.cluster.query(registry.database, rows)
        assert registry.cluster.query(other.database, rows) == before, table
        found += len(before)
    assert found > COUNT
    files = {
        x.relative_to(registry.artifacts): x.read_bytes() for x in registry.artifacts.rglob("*") if x.is_file()
    }
    assert files
    assert {
        x.relative_to(other.artifacts): x.read_bytes() for x in other.artifacts.rglob("*") if x.is_file()
    } == files
    with admin.Backup(path) as whole, pytest.raises(admin.UsageError, match="not empty"):
        admin.load(local(other), whole)


def test_a_damaged_backup_is_refused(registry: Any, local: Callable[..., Any], admin: Any, tmp_path: Path) -> None:
    path = admin.save(local(registry), tmp_path)
    data = path.read_bytes()
    place = data.index(b"PGDMP") + 1000
    for bad, message in (
        (data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], "database.dump is damaged"),
        (data[: len(data) // 2], "no whole backup"),
        (b"something else", "no backup"),
    ):
        path.write_bytes(bad)
        with pytest.raises(admin.UsageError, match=message):
            admin.Backup(path)


def test_a_wrong_password_is_refused(
    registry: Any, make_member: Callable[..., Any], tmp_path: Path, journal_writer: Callable[..., Path]
) -> None:
    member = make_member(registry, "mallory", tmp_path / "home")
    journal = journal_writer(tmp_path / "elsewhere", "20261121-000000-new", 1)
    code, out, errors = member.run("import", str(journal), MLFLOW_TRACKING_PASSWORD="not-the-password")
    assert code == 0
    assert out.startswith("20261121-000000-new: imported, 1 row; ")
    assert "refused the user name and password" in errors
    code, out, errors = member.run("sync", MLFLOW_TRACKING_PASSWORD="not-the-password")
    assert (code, out) == (2, "")
    assert "refused the user name and password: check MLFLOW_TRACKING_USERNAME" in errors
    assert "Nothing is lost" in errors
    assert "not-the-password" not in errors
    del member.environment["MLFLOW_TRACKING_PASSWORD"]
    assert member.run("sync")[0] == 2
    with_password = registry.address.replace("//", "//mallory:not-the-password@")
    code, _, errors = member.run("sync", MLFLOW_TRACKING_URI=with_password)
    assert code == 2
    assert "not-the-password" not in errors


def test_without_an_account_nothing_is_shown(registry: Any) -> None:
    for path in ("/", SEARCH, SEARCH.replace("/api/", "/ajax-api/"), "/api/2.0/mlflow/users/list"):
        assert registry.ask(path)[0] == 401, path
    assert registry.ask("/api/2.0/mlflow-artifacts/artifacts?path=1")[0] == 401


def test_a_foreign_name_is_refused(
    registry: Any, make_member: Callable[..., Any], tmp_path: Path, journal_writer: Callable[..., Path]
) -> None:
    for host in ("evil.example", f"localhost:{registry.port}", "registry.example.org.evil.example"):
        assert registry.ask(SEARCH, Host=host)[0] == 403, host
    for host in ("registry.example.org", "registry.example.org:8443", f"127.0.0.1:{registry.port}"):
        assert registry.ask(SEARCH, Host=host)[0] == 401, host
    journal_writer(tmp_path, "20261121-000000-new", 1)
    member = make_member(registry, "eve", tmp_path)
    code, _, errors = member.run("sync", MLFLOW_TRACKING_URI=f"http://localhost:{registry.port}")
    assert code == 2
    assert "does not go by this name" in errors
    assert "KERNELMARK_REGISTRY_HOSTS" in errors


def test_another_sites_page_may_not_write(registry: Any) -> None:
    search = "/ajax-api/2.0/mlflow/runs/search"
    named = {"Content_Type": "application/json", "Host": "registry.example.org:8443"}
    for origin, status in (("https://evil.example", 403), ("https://registry.example.org:8443", 401)):
        assert registry.ask(search, "POST", b"{}", Origin=origin, **named)[0] == status, origin


def test_an_account_that_is_shut_out(
    registry: Any, make_member: Callable[..., Any], tmp_path: Path, journal_writer: Callable[..., Path]
) -> None:
    journal_writer(tmp_path, "20261121-000001-leaver", 1)
    member = make_member(registry, "leaver", tmp_path)
    assert member.run("sync")[0] == 0
    named = "SELECT experiment_id FROM experiments WHERE name = 'kernelmark'"
    wanted = {
        "username": "leaver",
        "resource_type": "experiment",
        "resource_id": registry.cluster.query(registry.database, named)[0][0],
        "permission": "DENY",
    }
    granted = registry.ask(
        "/api/3.0/mlflow/users/permissions/grant",
        "POST",
        json.dumps(wanted).encode(),
        Authorization=registry.administrator,
        Content_Type="application/json",
    )
    assert granted[0] == 200, granted
    code, _, errors = member.run("sync")
    assert code == 2
    assert "this account may not do that" in errors


def test_no_secret_is_shown(registry: Any, make_member: Callable[..., Any], tmp_path: Path) -> None:
    make_member(registry, "somebody", tmp_path)
    shown = registry.command_lines()
    assert "mlflow server" in shown
    assert "uvicorn" in shown
    for text in (shown, registry.said()):
        assert not [x for x in SECRETS if x in text]


@pytest.mark.timeout(600)
def test_the_database_is_gone_and_comes_back(
    registry: Any, make_member: Callable[..., Any], tmp_path: Path, journal_writer: Callable[..., Path]
) -> None:
    member = make_member(registry, "patient", tmp_path)
    journal_writer(tmp_path, "20261121-000003-patient", 2)
    registry.cluster.stop()
    try:
        code, said = registry.run("health")
        assert (code, "in place of 401" in said) == (1, True), said
        code, _, errors = member.run("sync")
        assert code == 5
        assert "Nothing is lost" in errors
    finally:
        registry.cluster.start()
    assert registry.run("health")[0] == 0
    assert member.run("sync")[:2] == (0, "20261121-000003-patient: 4 rows recorded, 0 updated, 0 already there\n")


@pytest.mark.timeout(600)
def test_an_old_database_is_upgraded_when_asked_and_not_before(make_registry: Callable[..., Any]) -> None:
    registry = make_registry("old")
    environment = registry.environment | registry.cluster.local("old")
    done = subprocess.run([registry.python, "-c", OLD_SCHEMA], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    registry.cluster.query("old", OLD_RUN)
    code, said = registry.run("serve")
    assert code == 1
    assert f"has schema {OLD_REVISION}" in said
    assert "make registry-upgrade" in said
    assert registry.cluster.query("old", "SELECT version_num FROM alembic_version") == [[OLD_REVISION]]
    code, said = registry.run("upgrade")
    assert code == 0, said
    head = registry.cluster.query("old", "SELECT version_num FROM alembic_version")[0][0]
    assert f"schema {OLD_REVISION} -> {head}" in said
    done = subprocess.run([registry.python, "-c", READ], env=environment, capture_output=True, text=True)
    assert done.stdout == "row 0.25 FINISHED\n", done.stderr
    code, said = registry.run("upgrade")
    assert f"schema {head} -> {head}" in said


def test_it_does_not_start_without_its_secrets(make_registry: Callable[..., Any]) -> None:
    registry = make_registry("bare")
    (registry.secrets / "admin_password").write_text("\n")
    code, said = registry.run("serve")
    assert code == 1
    assert f"secret {registry.secrets}/admin_password is empty" in said
    (registry.secrets / "database_password").unlink()
    code, said = registry.run("serve")
    assert code == 1
    assert "database_password cannot be read: No such file" in said


def test_it_does_not_start_without_its_database(make_registry: Callable[..., Any]) -> None:
    registry = make_registry("wrong")
    (registry.secrets / "database_password").write_text("another\n")
    code, said = registry.run("serve")
    assert code == 1
    assert "the database cannot be reached" in said
    assert "password authentication failed" in said


def test_nobody_answers(make_registry: Callable[..., Any]) -> None:
    registry = make_registry("down")
    code, said = registry.run("health")
    assert code == 1
    assert "no answer" in said
    assert registry.run("nonsense")[0] == 2
