"""`kernelmark history`: through the real command line, with its exit codes."""

from __future__ import annotations

import hashlib
import json
import random

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import encode
from kernelmark.registry.store.metric import LATENCY, Metric
from kernelmark.registry.store.record import Case, Header, Measurement, Record, Request
from kernelmark.registry.views.history_page import sparkline
from kernelmark.suite import cli
from msgspec.structs import replace


@pytest.fixture
def call(make_repository, tmp_path, monkeypatch, capsys):
    """Calls the command outside of any checkout: exit code, output, error output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.run_command(cli.cli, ["history", *arguments])
        return (end.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def store(tmp_path):
    """Stores a run of gelu at a commit, by default one of its own."""
    numbers = iter(range(60))
    generator = random.Random(0)

    def store(
        ms,
        commit=None,
        sizes=(4,),
        key="k",
        spec="5bec",
        dirty=False,
        device="cpu",
        conditions=None,
        metric=LATENCY,
    ):
        number = next(numbers)
        commit = commit or hashlib.sha1(str(number).encode()).hexdigest()
        header = Header(
            schema_version=2, run=f"run-{number:04d}", created=f"2026-11-01T00:00:{number:02d}Z", harness="1",
            commit=commit, dirty=dirty, plan="quick", seed=0, replicates=3, device=device, key=key,
            conditions=conditions or {}, environment={}, metrics=(metric,),
        )  # fmt: skip
        lines = [
            Record(
                Case("gelu", f"M{size}", {"M": size}, {}, "fp32", "forward", spec, 1, 0, primary=metric.name),
                "kernelmark", "kernelmark", "1", i, 0, "cold", "ok", None,
                Measurement({metric.name: (ms * size / 4 * (1 + generator.gauss(0, 0.002)),)}, "events"),
            )
            for i in range(3)
            for size in sizes
        ]  # fmt: skip
        request = Request(cases=tuple(x.case for x in lines if x.replicate == 0))
        header = replace(header, request=request)
        path = Home(tmp_path / "home").journal(header.run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(encode(x) for x in (header, *lines)))
        return commit

    return store


def test_a_change_point_is_drawn(call, store, tmp_path):
    commits = [store(1.0 if number < 12 else 1.1) for number in range(24)]
    code, out, _ = call("gelu", "--html", str(tmp_path / "page.html"))
    assert code == 0
    assert "│" in out
    assert f"at {commits[12][:10]}" in out
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1
    assert f"at {commits[12][:10]}" in page
    assert "http" not in page.replace("http://www.w3.org", ""), "it opens offline"
    code, out, _ = call("gelu", "--json")
    (series,) = json.loads(out)["series"]
    assert [x["commit"] for x in series["points"]] == commits
    (change,) = series["change_points"]
    assert (change["commit"], change["index"]) == (commits[12], 12)
    assert change["change"] == pytest.approx(0.1, abs=0.01)


def test_a_value_that_is_no_time_is_told_in_its_unit_and_direction(call, store, tmp_path):
    rate = Metric("rate", "tokens/s", "higher")
    for number in range(12):
        store(1000.0 if number < 6 else 800.0, metric=rate)
    code, out, _ = call("gelu", "--html", str(tmp_path / "page.html"))
    assert code == 0
    assert "latest tokens/s" in out
    page = (tmp_path / "page.html").read_text()
    drawn = page[page.index("<svg") :]
    assert "tokens/s" in drawn
    assert " ms" not in drawn
    assert "var(--bad)" in drawn
    assert "var(--good)" not in drawn, "less of it is worse"
    (series,) = json.loads(call("gelu", "--json")[1])["series"]
    assert (series["unit"], series["better"]) == ("tokens/s", "higher")
    assert series["points"][-1]["value"] == pytest.approx(800, rel=0.01)
    first = call("gelu", "--csv")[1].splitlines()[1].split(",")
    assert (first[6], first[8]) == ("", "tokens/s"), "latency_ms is empty"


def test_what_belongs_together(call, store):
    first = store(1.0, sizes=(4, 8))
    store(2.0, commit=first)  # the same commit again
    store(9.0, key="another machine")
    store(9.0, dirty=True)
    second = store(1.0, sizes=(4, 8), spec="of another definition")
    code, out, _ = call("gelu", "--case", "M4", "--json")
    found = json.loads(out)
    assert (code, found["comparability_key"], found["runs_under_other_keys"]) == (0, "k", 1)
    assert [[x["commit"] for x in y["points"]] for y in found["series"]] == [[second]]
    store(4.0, spec="5bec", sizes=(4,))
    (series,) = json.loads(call("gelu", "--case", "M4", "--json")[1])["series"]
    assert [x["runs"] for x in series["points"]] == [2, 1]
    assert series["points"][0]["ms"] == pytest.approx(2**0.5, rel=0.01)
    code, out, _ = call("gelu")
    assert "Left out as not comparable with the newest: 1 run." in out


def test_what_broke_comparability_is_named(call, store):
    store(1.0, key="a", conditions={"gpu": "H200", "cudnn": "9.14.0"})
    store(1.0, key="b", conditions={"gpu": "H200"})  # an older kernelmark's
    store(1.0, key="b", conditions={"gpu": "H200"})
    store(1.0, key="c", conditions={"gpu": "H200", "cudnn": "9.15.1", "env/NCCL_ALGO": "Ring"})
    out = call("gelu")[1]
    assert "Left out as not comparable with the newest: 3 runs." in out
    assert "  2 runs: cudnn: not recorded / 9.15.1; env/NCCL_ALGO: not recorded / Ring" in out
    assert "  1 run: cudnn: 9.14.0 / 9.15.1; env/NCCL_ALGO: not recorded / Ring" in out
    told = json.loads(call("gelu", "--json")[1])["left_out"]
    assert [(x["comparability_key"], x["runs"]) for x in told] == [("b", 2), ("a", 1)]


def test_commits_stand_in_the_order_of_git(call, store, make_repository, monkeypatch):
    repository = make_repository("checkout")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-01T00:00:00Z")
    older = repository.commit(one="1")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-02T00:00:00Z")
    newer = repository.commit(one="2")
    monkeypatch.chdir(repository.folder)
    store(1.0, commit=newer)
    store(1.0, commit=older)  # measured later
    (series,) = json.loads(call("gelu", "--json")[1])["series"]
    assert [x["commit"] for x in series["points"]] == [older, newer]


def test_nothing_to_show(call, store, tmp_path, monkeypatch):
    code, _, err = call("gleu")
    assert code == 2
    assert "unknown operator 'gleu'. Did you mean 'gelu'?" in err
    code, _, err = call("gelu")
    assert code == 4
    assert "no run of a clean commit in" in err
    store(1.0)
    code, _, err = call("gelu", "--case", "M5")
    assert code == 2
    assert "no row has case M5" in err
    assert call("gelu", "--device", "cuda")[0] == 4
    code, _, err = call("gelu", "--html", str(tmp_path / "no/such/folder.html"))
    assert code == 2
    assert "cannot be written" in err


def test_a_series_that_hardly_moves_looks_so():
    assert sparkline([1.0, 1.001, 1.0]) == "▁▁▁"
    assert sparkline([1.0, 2.0], [1]) == "▁│█"
    assert sparkline([0.0]) == "▁"


def test_one_commit_has_not_changed_from_any(call, store):
    commit = store(1.0)
    code, out, _ = call("--csv")
    assert (code, out.count(commit)) == (0, 1)
    assert call()[1].splitlines()[2].split()[:5] == ["gelu", "1", "1", "0", "–"]
    store(1.0)
    assert "%" in call()[1].splitlines()[2]
