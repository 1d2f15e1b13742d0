"""A run measured again: what is drawn, and one verification from end to end."""

from __future__ import annotations

import json

import msgspec
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.index import Index
from kernelmark.registry.store.journal import Journal, encode
from kernelmark.registry.store.record import Header, Measurement
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.cli import cli, run_command
from kernelmark.suite.run.repeating import draw, measure
from kernelmark.suite.run.supervisor import NotResumable, OutOfBudget, Run


@pytest.fixture
def published(root, plan_file, monkeypatch):
    """A run of `double` by somebody else: two sizes by `plain`, and rows that cannot be drawn."""
    monkeypatch.setenv("KERNELMARK_PATH", str(root))
    catalog = Catalog.default()
    plan = plans.load(str(plan_file([16, 64])), catalog, "cpu")
    cells = plan.cells(catalog, "cpu", ("plain", "wrong", "absent"))
    request = plan.request(cells)
    header = Header(
        2, "theirs", "2026-11-20T12:00:00Z", "0", None, False, "tiny", 1, 1, "cpu", "k", {}, {}, request
    )  # fmt: skip
    seen = Measurement({"latency": (0.001,) * 6}, "monotonic")
    status = {"plain": "ok", "wrong": "incorrect", "absent": "ok"}
    records = tuple(
        cell.record(0, 0, end, None if end == "ok" else "off", seen if end == "ok" else None)
        for cell in cells
        for end in (status[cell.implementation.name],)
    )
    return Journal(header, records)


def names(found) -> list[str]:
    return sorted(f"{x.case.axes['N']} {x.implementation.name}" for x in found.cells)


def test_what_is_drawn_was_right_there_and_can_run_here(published):
    found = draw(published, Catalog.default(), 30, 1)
    assert (names(found), found.of) == (["16 plain", "64 plain"], 2)
    one = {tuple(names(draw(published, Catalog.default(), 1, seed))) for seed in range(20)}
    assert one == {("16 plain",), ("64 plain",)}


def test_what_cannot_be_drawn_is_said(published):
    bare = Journal(msgspec.structs.replace(published.header, request=type(published.header.request)()))
    with pytest.raises(InputError, match="does not say what it measured"):
        draw(bare, Catalog.default(), 30, 1)
    nothing = Journal(published.header, tuple(x for x in published.records if x.implementation != "plain"))
    with pytest.raises(InputError, match="no row of run theirs can be measured here"):
        draw(nothing, Catalog.default(), 30, 1)
    changed = msgspec.structs.replace(published.records[0].case, spec="other")
    asked = msgspec.structs.replace(published.header.request, cases=(changed,))
    old = Journal(msgspec.structs.replace(published.header, request=asked), published.records)
    with pytest.raises(NotResumable, match="operator double was changed since run theirs"):
        draw(old, Catalog.default(), 30, 1)


def test_a_verification_is_a_run_that_names_the_one_it_verifies(published, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    home = Home(tmp_path / "home")
    home.journals.mkdir(parents=True)
    home.journal("theirs").write_bytes(b"".join(encode(x) for x in (published.header, *published.records)))
    with pytest.raises(SystemExit) as ended:
        run_command(cli, ["verify", "theirs", "--sample", "1", "--budget", "5m", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 4  # nobody's conditions were `{}`
    assert (found["run"], len(found["rows"])) == ("theirs", 1)
    assert found["conditions"]["device"] == {"there": None, "here": "cpu"}
    (again,) = Index(home).verifying("theirs")
    assert again.header.run == found["verification"]
    assert again.header.seed == found["seed"]
    assert {(x.implementation, x.status) for x in again.records} == {("plain", "ok")}


def test_a_budget_leaves_fewer_processes_and_not_fewer_rows(published, tmp_path, monkeypatch):
    kept = []

    def execute(run):
        run.path.parent.mkdir(parents=True)
        run.path.write_bytes(b"".join(encode(x) for x in (published.header, *published.records)))
        run._writer = object()
        kept.extend(run._affordable(1))
        return run.path

    monkeypatch.setattr(Run, "execute", execute)
    catalog = Catalog.default()
    drawn = draw(published, catalog, 30, 1)
    measure(published, drawn, catalog, Home(tmp_path / "home"), 1, 0.001)
    assert kept == list(drawn.cells)


def test_a_budget_for_nothing_is_said(published, tmp_path):
    catalog = Catalog.default()
    drawn = draw(published, catalog, 30, 1)
    with pytest.raises(OutOfBudget, match="within 0 s; give it more with --budget") as ended:
        measure(published, drawn, catalog, Home(tmp_path / "home"), 1, 0.0)
    assert ended.value.exit_code == 3  # as of a run
