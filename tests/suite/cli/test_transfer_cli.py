"""`kernelmark export`, `import` and `sync` as a user calls them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner
from kernelmark.registry.errors import InputError
from kernelmark.registry.importers.formats import FORMATS
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal, encode
from kernelmark.registry.store.metric import Metric
from kernelmark.registry.store.record import Case, Header, Measurement, Record, Request
from kernelmark.registry.tracking.store import Ingested, Store, StoreError
from kernelmark.suite.cli import results, transfer
from kernelmark.suite.cli.transfer import command_export, command_import, command_sync

# MLflow 3.17.2 calls what SQLAlchemy 2.1 deprecates: not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

RUN = "20261120-120000-abcd"
HEADER = Header(
    schema_version=2,
    run=RUN,
    created="2026-11-20T12:00:00Z",
    harness="0.1.0",
    commit=None,
    dirty=False,
    plan="quick",
    seed=1,
    replicates=1,
    device="cpu",
    key="00aa11bb22cc33dd",
    conditions={},
    environment={},
)
CASE = Case("gelu", "M64-N64-fp32-forward", {"M": 64, "N": 64}, {}, "fp32", "forward", "5bec0001", 32768, 0)
SEEN = Measurement({"latency": (0.1, 0.2)}, "monotonic")
RECORD = Record(CASE, "torch", "torch", "2.13.0", 0, 0, "hot", "ok", None, SEEN)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A journal from elsewhere, and an empty home."""
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("KERNELMARK_EXPERIMENT", raising=False)
    path = tmp_path / "given.jsonl"
    path.write_bytes(encode(HEADER) + encode(RECORD))
    return path


@pytest.fixture
def down(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry whose server is down."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")


def test_a_shard_that_is_taken_in_says_which_are_not_here(journal: Path) -> None:
    header = msgspec.structs.replace(HEADER, request=Request(cases=(CASE,), shard=(2, 3)))
    journal.write_bytes(encode(header) + encode(RECORD))
    done = CliRunner().invoke(command_import, [str(journal), "--no-sync"], catch_exceptions=False)
    assert f"{RUN}: not here yet: shards 1/3, 3/3\n" in done.stdout


def test_rows_that_a_run_had_already_are_told_too(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    for created, updated, told in ((2, 0, "2 rows recorded;"), (0, 3, "0 rows recorded, 3 updated;")):
        done = SimpleNamespace(ingested=[Ingested(RUN, created, updated, 0, "link")], unreadable={})
        monkeypatch.setattr(transfer, "fill", lambda home, runs, done=done: done)
        results._record(Journal(HEADER, (RECORD,)), Home(tmp_path))
        assert told in capsys.readouterr().out


def test_import_then_sync_then_export(journal: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    cli = CliRunner()
    done = cli.invoke(command_import, [str(journal), "--json"], catch_exceptions=False)
    said = json.loads(done.stdout)
    assert said["run"] == RUN
    assert said["recorded"] is True
    assert said["note"] is None
    assert RUN in said["link"]
    done = cli.invoke(command_sync, [], catch_exceptions=False)
    assert done.stdout == "complete already: 1 run\n"
    done = cli.invoke(command_sync, ["latest", "--json"], catch_exceptions=False)
    synced = json.loads(done.stdout)["synced"]
    assert [(x["run"], x["created"], x["skipped"]) for x in synced] == [(RUN, 0, 1)]
    done = cli.invoke(command_sync, ["latest"], catch_exceptions=False)
    assert done.stdout == f"{RUN}: 0 rows recorded, 0 updated, 1 already there\n"
    done = cli.invoke(command_export, ["latest", "--output", str(tmp_path / "out")], catch_exceptions=False)
    assert Path(done.stdout.strip()).name == f"{RUN}.jsonl.gz"


def test_import_says_why_the_registry_refuses_a_run(journal: Path) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    header = msgspec.structs.replace(HEADER, metrics=(Metric("a//b", "W"),))
    seen = Measurement({"latency": (0.1,), "a//b": (1.0,)}, "monotonic")
    journal.write_bytes(encode(header) + encode(msgspec.structs.replace(RECORD, measurement=seen)))
    done = CliRunner().invoke(command_import, [str(journal)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "imported, 1 row" in done.stdout
    assert f"{RUN}.jsonl is refused by the registry" in done.stderr
    assert "a//b/median_W" in done.stderr


def of_database(code: int) -> Exception:
    """What a server answers that its database refused something."""
    from mlflow.exceptions import MlflowException

    return MlflowException("value too long\nfor it [SQL: INSERT INTO runs …]", code)


def of_proxy(status: int) -> Exception:
    """What a proxy before a server answers."""
    from requests import HTTPError, Response

    response = Response()
    response.status_code = status
    return HTTPError(f"{status} Client Error", response=response)


@pytest.mark.parametrize(
    ("cause", "code", "said"),
    [
        (of_database, 1000, "is refused by the registry: value too long for it"),
        (of_database, 1, None),  # INTERNAL_ERROR
        (of_proxy, 413, "is refused by the registry: its journal or its report is larger than"),
        (of_proxy, 502, None),
    ],
)
def test_a_run_that_a_server_refuses_is_in_no_others_way(
    cause: Callable[[int], Exception], code: int, said: str | None, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")

    def refuse(self: Store, journal: Journal, *_: object) -> Ingested:
        if journal.header.run == RUN:
            raise StoreError("it failed") from cause(code)
        return Ingested(journal.header.run, 1, 0, 0, "")

    cli = CliRunner()
    cli.invoke(command_import, [str(journal), "--no-sync"], catch_exceptions=False)
    journal.write_bytes(encode(msgspec.structs.replace(HEADER, run=f"{RUN}-2")) + encode(RECORD))
    cli.invoke(command_import, [str(journal), "--no-sync"], catch_exceptions=False)
    monkeypatch.setattr(Store, "ingest", refuse)
    done = cli.invoke(command_sync, [])
    assert isinstance(done.exception, StoreError if said is None else InputError)
    assert (said or "it failed") in str(done.exception)
    assert "SQL" not in str(done.exception)
    assert (f"{RUN}-2: 1 row recorded" in done.stdout) is (said is not None)


def test_import_without_the_registry(journal: Path) -> None:
    done = CliRunner().invoke(command_import, [str(journal), "--no-sync"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout == f"{RUN}: imported, 1 row; look with: kernelmark show {RUN}\n"
    assert "kernelmark sync" in done.stderr


@pytest.mark.usefixtures("down")
def test_a_server_that_is_down_stops_sync_and_not_import(journal: Path) -> None:
    done = CliRunner().invoke(command_import, [str(journal), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["recorded"] is False
    assert "kernelmark sync" in done.stderr
    done = CliRunner().invoke(command_sync, [])
    assert isinstance(done.exception, StoreError)
    assert done.exception.exit_code == 5


def test_sync_names_what_it_could_not_read(journal: Path) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    CliRunner().invoke(command_import, [str(journal), "--no-sync"], catch_exceptions=False)
    bad = journal.parent / "home" / "journals" / "bad.jsonl"
    bad.write_bytes(encode(HEADER) + b"nonsense\n" + encode(RECORD))
    done = CliRunner().invoke(command_sync, [])
    assert "1 row recorded" in done.stdout
    assert isinstance(done.exception, InputError)
    assert "bad.jsonl: line 2" in str(done.exception)


@pytest.mark.parametrize("as_json", [True, False])
def test_a_damaged_file_is_in_no_others_way(journal: Path, as_json: bool) -> None:
    damaged = journal.with_name("damaged.jsonl.gz")
    damaged.write_bytes(b"\x1f\x8bnot whole")
    other = journal.with_name("other.jsonl")
    other.write_bytes(encode(msgspec.structs.replace(HEADER, run="other")) + encode(RECORD))
    files = [str(x) for x in (journal, damaged, other)]
    done = CliRunner().invoke(command_import, [*files, "--no-sync", *(["--json"] if as_json else [])])
    assert isinstance(done.exception, InputError)
    assert "not imported:" in str(done.exception)
    assert str(damaged) in str(done.exception)
    assert Home().runs() == [RUN, "other"]
    if as_json:
        assert [json.loads(x)["run"] for x in done.stdout.splitlines()] == [RUN, "other"]
    else:
        assert f"{RUN}: imported" in done.stdout
        assert "other: imported" in done.stdout


EXAMPLES = Path(__file__).parents[2] / "registry" / "importers" / "examples"


def test_other_tools_files_become_runs(journal: Path) -> None:
    file = str(EXAMPLES / "google_benchmark.json")
    done = CliRunner().invoke(command_import, ["--format", "google-benchmark", "--no-sync", "--json", file, file])
    assert done.exit_code == 0, done.output
    said = [json.loads(x) for x in done.stdout.splitlines()]
    assert [x["run"] for x in said] == ["20261120-101112-6e05c183"] * 2
    with pytest.raises(InputError, match="for other tools' files"):
        CliRunner().invoke(command_import, ["--one-run", str(journal)], catch_exceptions=False)
    arguments = ["--format", "google-benchmark", "--commit", "main", file]
    with pytest.raises(InputError, match="'main' is no whole git hash"):
        CliRunner().invoke(command_import, arguments, catch_exceptions=False)


def test_the_choices_are_the_formats() -> None:
    form = next(x for x in command_import.params if x.name == "form")
    assert set(form.type.choices) == {"journal", *FORMATS}  # type: ignore[attr-defined]
