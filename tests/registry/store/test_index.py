"""The index: what it finds, how little it reads, and what it does with journals that change."""

from __future__ import annotations

import gc
import gzip
import math
import sqlite3
import threading
import time

import pytest
from kernelmark.registry.store import index as module
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.index import Index, clean
from kernelmark.registry.store.journal import encode
from kernelmark.registry.store.processes import Processes
from kernelmark.registry.store.record import Case, Header, Key, Measurement, Record, Request

KEY = Key("gelu", "M4", "kernelmark", "cold")


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path / "home")
    home.journals.mkdir(parents=True)
    return home


@pytest.fixture
def store(home):
    """Writes a journal of a run at a commit."""

    def store(number, commit="a" * 40, ms=(1.0, 1.0, 1.0), key="k", spec="5bec", suffix="", **fields):
        header = Header(
            schema_version=2, run=f"run-{number}", created=f"2026-11-01T00:00:{number:02d}+00:00", harness="1",
            commit=commit, plan="quick", seed=0, replicates=len(ms), device="cpu", key=key, environment={},
            **{"dirty": False, "conditions": {}, **fields},
        )  # fmt: skip
        case = Case("gelu", "M4", {"M": 4}, {}, "fp32", "forward", spec, 1, 0)
        lines = [
            Record(
                case,
                "kernelmark",
                "kernelmark",
                "1",
                i,
                0,
                "cold",
                "ok",
                None,
                timed(x),
            )
            for i, x in enumerate(ms)
            if x is not None
        ]
        text = b"".join(encode(x) for x in (header, *lines))
        path = home.journals / f"run-{number}.jsonl{suffix}"
        path.write_bytes(gzip.compress(text) if suffix else text)
        return path

    return store


def timed(ms):
    return Measurement({"latency": (ms,)}, "events")


def names(entries):
    return [x.name for x in entries]


def test_runs_are_found_by_what_they_are(home, store):
    store(1)
    store(2, commit="b" * 40, key="other")
    store(3, dirty=True)
    store(4, commit=None)
    store(5, suffix=".gz")
    (home.journals / "torn.jsonl").write_bytes(b'{"kind":"header","schem')
    (home.journals / "run-9.lock").touch()
    index = Index(home)
    assert names(index.runs()) == ["run-5", "run-2", "run-1"]
    assert names(index.runs(commit="a" * 40)) == ["run-5", "run-1"]
    assert names(index.runs(key="other", device="cpu", plan="quick")) == ["run-2"]
    assert names(index.runs(device="cuda")) == []
    assert names(index.runs(limit=1)) == ["run-5"]
    assert index.commits() == ["a" * 40, "b" * 40]
    assert index.commits(1) == ["a" * 40]


def test_each_journal_is_read_once(home, store, monkeypatch):
    store(1)
    seen = []
    read, header = module.read, module.read_header
    monkeypatch.setattr(module, "read", lambda path: (seen.append(("whole", path.name)), read(path))[1])
    monkeypatch.setattr(module, "read_header", lambda path: (seen.append(("header", path.name)), header(path))[1])
    for _ in range(3):
        index = Index(home)
        rows = [index.processes(x) for x in index.runs()]
    assert rows == [{KEY: Processes((1.0, 1.0, 1.0), "kernelmark", "5bec/events")}]
    assert seen == [("header", "run-1.jsonl"), ("whole", "run-1.jsonl")]
    # A run that went on says something else.
    store(1, ms=(2.0, 2.0, 2.0, 2.0))
    index = Index(home)
    assert index.processes(index.runs()[0])[KEY].count == 4
    assert seen[2:] == [("whole", "run-1.jsonl")]


def test_a_journal_that_took_anothers_place_is_read_anew(home, store):
    """As that of shards, which is made anew with each of them; of the same size or not."""
    path = store(1)
    index = Index(home)
    assert index.processes(index.runs()[0])[KEY].values == (1.0, 1.0, 1.0)
    kept = path.with_suffix(".old")
    path.rename(kept)
    store(1, commit="b" * 40, ms=(2.0, 2.0, 2.0))
    assert path.stat().st_size == kept.stat().st_size
    again = Index(home)
    (entry,) = again.runs()
    assert (entry.commit, again.processes(entry)[KEY].values) == ("b" * 40, (2.0, 2.0, 2.0))


def test_means_of_another_version_of_the_library_do_not_belong_together(home, store):
    store(1, conditions={"python": "3.11"})
    index = Index(home)
    assert index.processes(index.runs()[0])[KEY].definition == "5bec/events/1"


def test_what_is_gone_is_forgotten(home, store):
    path, _ = store(1), store(2)
    index = Index(home)
    gone = index.runs()[1]
    path.unlink()
    assert index.processes(gone) == {}
    assert names(Index(home).runs()) == ["run-2"]


def test_reruns_of_what_was_under_suspicion_are_no_runs(home, store):
    store(1, request=Request(stage=1))
    store(2, request=Request(stage=2))
    store(3)
    assert names(clean(Index(home).runs())) == ["run-3", "run-1"]


def test_spreads_are_kept_by_key(home):
    Index(home).keep_spreads("k", {KEY: [(1e-4, 4.0), (2e-4, 5.0)]})
    assert Index(home).spreads("k") == {KEY: [(1e-4, 4.0), (2e-4, 5.0)]}
    Index(home).keep_spreads("k", {KEY: [(3e-4, 6.0)]})
    assert Index(home).spreads("k") == {KEY: [(3e-4, 6.0)]}
    assert Index(home).spreads("other") == {}


def test_a_row_has_a_value_for_each_process(home, store):
    store(1, ms=(1.0, None, 3.0))
    index = Index(home)
    row = index.processes(index.runs()[0])[KEY]
    assert row.values[::2] == (1.0, 3.0)
    assert math.isnan(row.values[1])
    assert row.count == 2


def test_the_noise_stays_where_only_the_other_tables_are_others(home, store):
    """The index of layout 1 had means in the place of processes' values."""
    store(1)
    Index(home).keep_spreads("k", {KEY: [(1e-4, 4.0)]})
    with sqlite3.connect(home.folder / "index.db") as connection:
        connection.execute("DROP TABLE processes")
        connection.execute("CREATE TABLE means (name TEXT, ms REAL)")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    index = Index(home)
    assert index.processes(index.runs()[0])[KEY].values == (1.0, 1.0, 1.0)
    assert index.spreads("k") == {KEY: [(1e-4, 4.0)]}


def test_an_index_of_another_layout_is_made_anew(home, store):
    store(1)
    Index(home)
    with sqlite3.connect(home.folder / "index.db") as connection:
        connection.execute("DROP TABLE runs")
        connection.execute("CREATE TABLE runs (something INT)")
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    assert names(Index(home).runs()) == ["run-1"]


def test_a_home_that_cannot_be_written_is_read_all_the_same(home, store):
    store(1)
    (home.folder / "index.db").mkdir()
    assert names(Index(home).runs()) == ["run-1"]


def test_an_index_that_can_only_be_read(home, store, monkeypatch):
    store(1)
    index = Index(home)
    index.keep_spreads("k", {KEY: [(1.0, 2.0)]})
    store(2)
    before = (home.folder / "index.db").read_bytes()
    connect = sqlite3.connect

    def only_read(path, **options):
        return connect(path) if path == ":memory:" else connect(f"file:{path}?mode=ro", uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", only_read)
    index = Index(home)
    assert names(index.runs()) == ["run-2", "run-1"]
    assert index.processes(index.runs()[0]).keys() == {KEY}
    assert index.spreads("k") == {KEY: [(1.0, 2.0)]}
    assert (home.folder / "index.db").read_bytes() == before


def test_whichever_thread_collects_an_index_closes_it(home, store, recwarn):
    """As a server's may, of one that is in a cycle."""
    store(1)
    index = Index(home)
    connection = index._connection
    index.itself = index
    del index
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        connection.execute("SELECT 1")
    gc.collect()
    assert not recwarn.list


def test_a_home_that_is_not_there(tmp_path):
    assert Index(Home(tmp_path / "nowhere")).runs() == []
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.usefixtures("untraced")
def test_a_hundred_thousand_runs_are_searched_without_reading_them(home, store, monkeypatch):
    """One index over them; a search reads none, and only what is new since the last time is opened at all."""
    store(1)
    Index(home)
    database = sqlite3.connect(home.folder / "index.db")
    row = database.execute("SELECT * FROM runs").fetchone()
    numbers = range(100_000)
    with database:
        database.executemany(
            "INSERT INTO runs VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                (
                    f"r{i:06d}",
                    f"r{i:06d}.jsonl",
                    f"{i % 5000:040x}",
                    0,
                    f"key{i % 7}",
                    *row[5:6],
                    f"2026-{i:06d}",
                    *row[7:],
                )
                for i in numbers
            ),
        )
    database.close()
    for i in numbers:  # empty: whoever reads one learns nothing
        (home.journals / f"r{i:06d}.jsonl").touch()
    opened = []
    monkeypatch.setattr(module, "read_header", lambda path: opened.append(path))
    monkeypatch.setattr(module, "read", lambda path: pytest.fail("it read a journal"))
    begin = time.process_time()
    index = Index(home)
    found = index.runs(commit=f"{4321:040x}", key="key3", limit=20)
    commits = index.commits(limit=10)
    seconds = time.process_time() - begin
    assert opened == []
    assert found == sorted(found, key=lambda x: x.created, reverse=True)
    assert {x.commit for x in found} == {f"{4321:040x}"}
    assert len(found) == sum(i % 5000 == 4321 and i % 7 == 3 for i in numbers)
    assert len(commits) == 10
    assert seconds < 3, "the folder's list alone is 100,000 names"
    assert "run-1" in names(index.runs(commit="a" * 40))
