"""Journals that no measurement wrote: what is refused, with which words, and that it costs nobody else."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import msgspec
import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store import bounds
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.index import Index
from kernelmark.registry.store.journal import encode, parse, read
from kernelmark.registry.tracking import store
from kernelmark.registry.tracking.store import Ingested, sync


def lines(literal, **changes):
    """A journal's header and record as builtins, with fields replaced by path: `record.measurement.batch`."""
    header = msgspec.to_builtins(literal.header())
    record = msgspec.to_builtins(literal.record())
    for path, value in changes.items():
        at = {"header": header, "record": record}
        *way, last = path.split("__")
        for step in way:
            at = at[step]
        at[last] = value
    return b"".join(json.dumps(x).encode() + b"\n" for x in (header, record))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("header__replicates", 10**12, "line 1: replicates: 1000000000000 is not within"),
        ("header__run", "../../x", "line 1: run: '../../x' has not the form"),
        ("header__run", "x" * 5_000_000, "has not the form"),
        ("header__commit", "a\nb", "line 1: commit: 'a\\nb' has not the form"),
        ("header__commit", "--upload-pack=x", "has not the form"),
        ("header__created", "yesterday", "line 1: created: 'yesterday' is no time"),
        ("header__created", "9999-12-31T23:59:59-23:00", "line 1: created: "),
        ("header__schema_version", 0, "line 1: schema_version: 0 is none"),
        ("header__plan", "\x1b[31m", "plan: '\\x1b[31m' is no name"),
        ("header__key", "k" * 300, "is no name of at most 250"),
        ("header__conditions", {"gpu\n": 1}, "conditions: 'gpu\\n' is no name"),
        ("header__conditions", {str(i): i for i in range(3000)}, "conditions: more than 2000 names"),
        ("header__request__shard", [5, 3], "line 1: shard: 5 is not within 1 and 3"),
        ("header__request__shard", [1, -3], "line 1: shards: -3 is not within 1 and 9999"),
        ("header__request__shard", [1, 10**18], "line 1: shards: 1000000000000000000 is not within"),
        ("record__case__operator", "\x1b]0;x\x07", "operator: "),
        ("record__case__axes", {"=cmd()": 1}, "an axis: '=cmd()' has not the form"),
        ("record__case__axes", {"[x": 1}, "an axis"),
        ("record__case__axes", {".": 1}, "an axis"),
        ("record__case__axes", {"B" * 251: 1}, "an axis"),
        ("record__case__options", {"a b": True}, "an option"),
        ("record__case__bytes", -1, "bytes: -1 is not within"),
        ("record__replicate", -1, "replicate: -1"),
        ("record__replicate", 10**6, "replicate: 1000000"),
        ("record__implementation", "a\u202eb", "implementation"),
        ("record__measurement__samples", {"latency": [5e-324]}, "samples of latency: 5e-324"),
        ("record__measurement__samples", {"latency": [1e300]}, "samples of latency: 1e+300"),
        ("record__measurement__samples", {"latency": [1.0], "\n": [1.0]}, "a metric's name"),
        ("record__measurement__throttled", [10**9], "throttled: an index of no sample"),
        ("record__measurement__batch", 0, "batch: 0"),
        ("record__spent_s", {"x": -1.0}, "spent_s"),
    ],
)
def test_what_no_measurement_wrote_is_refused_with_its_line(literal, path, value, said):
    with pytest.raises(InputError) as error:
        parse(lines(literal, **{path: value}))
    assert said in str(error.value)
    assert len(str(error.value)) < 500


def test_free_text_is_kept_without_what_a_terminal_obeys(literal):
    bad = literal.record(status="error", reason="no \x1b[31mluck\n" + "x" * 10_000)
    text = encode(literal.header(conditions={"gpu": "a\x07b"})) + encode(bad)
    journal = parse(text)
    assert journal.header.conditions == {"gpu": "a�b"}
    assert journal.records[0].reason.startswith("no �[31mluck�xxx")
    assert len(journal.records[0].reason) == bounds.TEXT


@pytest.mark.parametrize("text", [b"[" * 300_000, b'{"a":' * 300_000, b'{"kind":"header","conditions":' * 100_000])
def test_what_is_nested_too_deep(text):
    with pytest.raises(InputError):
        parse(text + b"\n")


def test_a_corrupted_gzip(tmp_path, literal):
    whole = gzip.compress(encode(literal.header()) * 50)
    for place in range(12, len(whole), 7):
        path = tmp_path / "x.jsonl.gz"
        path.write_bytes(whole[:place] + b"\xff\x00" + whole[place + 2 :])
        with pytest.raises(InputError):
            read(path)


@pytest.mark.usefixtures("untraced")
def test_a_bomb_is_not_inflated(tmp_path, literal, monkeypatch):
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(encode(literal.header()) + b"\n" * (1 << 22) + b" " * (1 << 24)))
    monkeypatch.setattr(bounds, "LINES", 1000)
    with pytest.raises(InputError, match="no journal of a run"):
        read(path)
    monkeypatch.setattr(bounds, "LINES", 10**9)
    monkeypatch.setattr(bounds, "INFLATED", 1 << 20)
    with pytest.raises(InputError, match="no journal of a run"):
        read(path)
    monkeypatch.setattr(bounds, "INFLATED", 1 << 40)
    monkeypatch.setattr(bounds, "LINE", 1 << 20)
    with pytest.raises(InputError, match="no journal of a run"):
        read(path)


def test_one_journal_may_hold_so_many_samples(literal, monkeypatch):
    monkeypatch.setattr(bounds, "SAMPLES", 5)
    text = encode(literal.header()) + encode(literal.record()) + encode(literal.record(replicate=1))
    with pytest.raises(InputError, match="line 3: the journal holds more than 5 samples"):
        parse(text)


def test_equal_cases_are_one_object(literal):
    text = b"".join(encode(x) for x in (literal.header(), *(literal.record(replicate=i) for i in range(3))))
    cases = {id(x.case) for x in parse(text).records}
    assert len(cases) == 1


def test_a_file_of_another_name_is_in_nobodys_way(tmp_path, literal):
    home = Home(tmp_path)
    home.journals.mkdir()
    for name in ("20260101-000000-aaaa.jsonl", "old.copy.jsonl", "note.txt", "x.jsonl.bak", ".hidden.jsonl"):
        (home.journals / name).write_bytes(encode(literal.header()))
    assert home.runs() == ["20260101-000000-aaaa", "old.copy"]
    assert home.find("old.copy").name == "old.copy.jsonl"
    assert home.find("2026").name == "20260101-000000-aaaa.jsonl"


def test_a_home_of_somebody_else(tmp_path, monkeypatch):
    home = Home(tmp_path)
    home.journals.mkdir()

    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(InputError, match="journals cannot be read: Permission denied"):
        home.find("latest")


class Fake:
    """A registry that takes what it can."""

    def complete(self):
        return {}

    def ingest(self, journal, report, progress):
        if journal.header.plan == "overflows":
            raise OverflowError("math range error")
        return Ingested(journal.header.run, 1, 0, 0, "")

    def attach(self, verification):
        pass


def test_a_bad_journal_costs_itself_only(tmp_path, literal, monkeypatch):
    home = Home(tmp_path)
    home.journals.mkdir()
    for i in range(4):
        header = literal.header(run=f"run{i}", plan="overflows" if i == 1 else "quick")
        text = lines(literal, header__replicates=10**12) if i == 2 else encode(header)
        (home.journals / f"run{i}.jsonl").write_bytes(text)
    monkeypatch.setattr(store.Store, "open", classmethod(lambda cls, uri, home: Fake()))
    done = sync(home)
    assert [x.run for x in done.ingested] == ["run0", "run3"]
    assert done.unreadable.keys() == {"run1.jsonl", "run2.jsonl"}
    assert "makes no sense: OverflowError" in done.unreadable["run1.jsonl"]
    assert [x.name for x in Index(home).runs()] == ["run3", "run1", "run0"]


@pytest.mark.usefixtures("untraced")
def test_five_thousand_journals_are_found_at_once(tmp_path, literal, monkeypatch):
    home = Home(tmp_path)
    home.journals.mkdir()
    text = encode(literal.header())
    for i in range(5000):
        (home.journals / f"20260101-{i:06}-aaaa.jsonl").write_bytes(text)
    monkeypatch.setattr(store.Store, "open", classmethod(lambda cls, uri, home: Fake()))
    begun: list[float] = []
    monkeypatch.setattr(Fake, "ingest", lambda *given: begun.append(time.process_time()) or 1 / 0)
    begin = time.process_time()
    sync(home, [])
    assert begun[0] - begin < 2


def test_many_records_are_read_in_little_time_and_memory(literal):
    """A tenth of 200,000, for which 8 s and 400 MiB are the goal with summing up and showing."""
    case = literal.case()
    text = encode(literal.header()) + b"".join(
        encode(literal.record(f"i{i % 200}", [1.0] * 10, case=case, replicate=i // 200)) for i in range(20_000)
    )
    begin = time.process_time()
    journal = parse(text)
    assert len(journal.records) == 20_000
    assert time.process_time() - begin < 2.0  # 0.3 s on a quiet machine
