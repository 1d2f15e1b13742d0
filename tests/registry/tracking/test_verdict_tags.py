"""Verdicts as tags, in a real SQLite registry, found again as the UI filters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kernelmark.registry.detection.comparison_report import ComparisonReport
from kernelmark.registry.detection.decision import Progress
from kernelmark.registry.detection.verdict import Flag, Verdict
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.record import Key
from kernelmark.registry.tracking.store import sync
from kernelmark.registry.tracking.verdict_tags import has_registry, write_back

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
# MLflow 3.17.2 calls what SQLAlchemy 2.1 deprecates: not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

RUN = "20261120-120000-abcd"
BASE = "b" * 40


@pytest.fixture
def home(
    tmp_path: Path, fresh_database: Path, make_journal: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> Home:
    """A home with an initialised registry and a run that is not in it yet."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    home = Home(tmp_path / "home")
    home.folder.mkdir(exist_ok=True)
    shutil.copy(fresh_database, home.database)
    write(make_journal(RUN), home.journal(RUN))
    return home


def report(home: Home, *kinds: str) -> ComparisonReport:
    journal = home.load(RUN)
    names = list(dict.fromkeys(x.case.name for x in journal.records))
    verdicts = tuple(
        Verdict(Key("rms_norm", name, "kernelmark", "cold"), kind, "why", change=0.0612)  # type: ignore[arg-type]
        for name, kind in zip(names, kinds, strict=True)
    )
    return ComparisonReport("main", "HEAD", Progress(verdicts))


def found(home: Home, condition: str) -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{home.database}")
    experiment = client.get_experiment_by_name("kernelmark")
    return list(client.search_runs([experiment.experiment_id], condition))


def test_the_ui_can_filter_on_the_verdict(home: Home) -> None:
    made = report(home, "regression", "no change")
    assert write_back(made, BASE, [RUN], home) == 2
    (row,) = found(home, "tags.verdict = 'regression' and tags.kind = 'row'")
    tags = row.data.tags
    assert (tags["implementation"], tags["verdict_change"], tags["verdict_baseline"]) == (
        "kernelmark",
        "+0.0612",
        BASE,
    )
    (whole,) = found(home, "tags.verdict = 'regression' and tags.kind = 'summary'")
    assert whole.data.tags["verdict_exit_code"] == "1"
    assert len(found(home, "tags.verdict = 'no change'")) == 1


def test_twice_writes_nothing_new(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    made = report(home, "regression", "no change")
    write_back(made, BASE, [RUN], home)
    before = {x.info.run_id: dict(x.data.tags) for x in found(home, "")}
    written = []
    monkeypatch.setattr(mlflow.MlflowClient, "set_tag", lambda *arguments: written.append(arguments))
    monkeypatch.setattr(mlflow.MlflowClient, "delete_tag", lambda *arguments: written.append(arguments))
    assert write_back(made, BASE, [RUN], home) == 2
    assert written == []
    assert {x.info.run_id: dict(x.data.tags) for x in found(home, "")} == before


def test_another_verdict_takes_the_place_of_the_first(home: Home) -> None:
    first = report(home, "regression", "warning")
    verdicts = first.progress.verdicts
    flagged = msgspec.structs.replace(verdicts[0], flags=(Flag("memory", 1, 2, "more"),))
    write_back(ComparisonReport("a", "b", Progress((flagged, verdicts[1]))), BASE, [RUN], home)
    assert found(home, "tags.verdict_worse = 'memory'")
    only = ComparisonReport(
        "main", "HEAD", Progress((msgspec.structs.replace(verdicts[0], kind="no change", change=None),))
    )
    assert write_back(only, BASE, [RUN], home) == 1
    assert found(home, "tags.verdict = 'regression'") == found(home, "tags.verdict = 'warning'") == []
    assert found(home, "tags.verdict_worse = 'memory'") == []
    (row,) = found(home, "tags.verdict = 'no change' and tags.kind = 'row'")
    assert "verdict_change" not in row.data.tags


def test_a_later_sync_leaves_the_verdict(home: Home) -> None:
    write_back(report(home, "regression", "no change"), BASE, [RUN], home)
    (done,) = sync(home, [RUN]).ingested
    assert (done.created, done.updated) == (0, 0)
    assert len(found(home, "tags.verdict = 'regression' and tags.kind = 'row'")) == 1


def test_no_registry_is_made_for_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    home = Home(tmp_path / "empty")
    assert not has_registry(home)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert has_registry(home)
