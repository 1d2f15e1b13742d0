"""Shards of a run become one journal, in whichever order they come."""

from __future__ import annotations

from itertools import permutations

import pytest
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import encode, read
from kernelmark.registry.store.record import Footer, Request
from kernelmark.registry.store.transfer import import_journal

RUN = "20261122-000000-aaaa"


@pytest.fixture
def shard(literal, tmp_path):
    """Writes the i-th of three shards, of one case and two replicates, to a file."""

    def make(number, complete=True, **changes):
        case = literal.case(name=f"S{number}")
        request = Request(cases=(case,), implementations=("torch",), shard=(number, 3))
        header = literal.header(run=RUN, request=request, replicates=2, **changes)
        lines = [header, *(literal.record("torch", float(number), case=case, replicate=r) for r in (0, 1))]
        lines.append(Footer("2026-11-22T00:00:00Z", 10.0, complete, {"sample": 5.0}))
        path = tmp_path / f"{number}-{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_bytes(b"".join(map(encode, lines)))
        return path

    return make


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


def test_one_run_comes_of_them_in_any_order(shard, home, literal):
    files = [shard(i) for i in (1, 2, 3)]
    seen = set()
    for number, order in enumerate(permutations(files)):
        other = Home(home.folder / str(number))
        for path in (*order, order[0]):  # one of them twice
            assert import_journal(path, other) == RUN
        seen.add(other.journal(RUN).read_bytes())
        assert other.runs() == [RUN]
    assert len(seen) == 1
    (whole,) = [read(other.find(RUN))]
    assert [x.name for x in whole.header.request.cases] == ["S1", "S2", "S3"]
    assert whole.header.request.shard is None
    assert len(rows(whole)) == 3
    assert [x.complete for x in whole.footers] == [False, False, True]


def test_a_run_is_not_complete_before_the_last_shard(shard, home):
    import_journal(shard(2), home)
    assert [x.case.name for x in read(home.find(RUN)).records] == ["S2", "S2"]
    import_journal(shard(1), home)
    assert not any(x.complete for x in read(home.find(RUN)).footers)
    import_journal(shard(3, complete=False), home)
    assert not any(x.complete for x in read(home.find(RUN)).footers)


def test_a_shard_that_was_gone_on_with_takes_the_place_of_its_beginning(shard, home, literal):
    begun = shard(1)
    whole = begun.read_bytes()
    begun.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    import_journal(begun, home)
    assert len(read(home.find(RUN)).records) == 1
    begun.write_bytes(whole)
    import_journal(begun, home)
    assert len(read(home.find(RUN)).records) == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 2}, "differ in seed"),
        ({"commit": "b" * 40}, "differ in commit"),
        ({"key": "other", "conditions": {"gpu": "another"}}, r"differ in key, .*gpu \("),
    ],
)
def test_what_is_no_one_run_is_refused_and_what_was_there_stays(shard, home, changes, told):
    import_journal(shard(1), home)
    before = home.journal(RUN).read_bytes()
    with pytest.raises(InputError, match=told):
        import_journal(shard(2, **changes), home)
    assert home.journal(RUN).read_bytes() == before
    import_journal(shard(2), home)
    assert len(read(home.find(RUN)).records) == 4
