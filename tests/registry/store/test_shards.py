"""Shards of a run become one journal, in whichever order they come."""

from __future__ import annotations

import dataclasses
import re
from itertools import permutations

import pytest
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.errors import InputError
from kernelmark.registry.store import shards
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.index import Index
from kernelmark.registry.store.journal import Journal, encode, read
from kernelmark.registry.store.metric import LATENCY, Metric
from kernelmark.registry.store.record import BOARDS, Ceiling, Footer, Request, boards
from kernelmark.registry.store.shards import checked_beside, few, join
from kernelmark.registry.store.transfer import import_journal
from kernelmark.registry.views.summary import warnings
from msgspec import UNSET
from msgspec.structs import replace

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


def test_a_shard_that_could_not_be_joined_is_refused_before_it_is_measured(shard, home):
    import_journal(shard(1), home)
    here = read(home.shards / f"{RUN}.1-of-3.jsonl").header
    checked_beside(home, RUN, (2, 3), seed=here.seed, control=None)
    checked_beside(home, RUN, (1, 3), seed=here.seed + 1)  # the same one: that it is here is said elsewhere
    with pytest.raises(InputError, match=rf"differs from this one in seed \({here.seed} / {here.seed + 1}\)"):
        checked_beside(home, RUN, (2, 3), seed=here.seed + 1, control=None)
    with pytest.raises(InputError, match=r"in shards \(3 / 4\)"):
        checked_beside(home, RUN, (2, 4), seed=here.seed)
    with pytest.raises(InputError, match=r"in control \(None / gelu/x\)"):
        checked_beside(home, RUN, (2, 3), control="gelu/x")


def test_shards_that_are_cut_from_two_plans_are_no_run(shard, home, literal, tmp_path):
    """They would have a case twice, lack another, and pass for whole."""
    import_journal(shard(1), home)
    here = read(home.shards / f"{RUN}.1-of-3.jsonl").header

    def asked(*names, **changes):
        return Request(cases=tuple(literal.case(name=x) for x in names), implementations=("torch",), **changes)

    def file(number, request):
        header = literal.header(run=RUN, request=replace(request, shard=(number, 3)), replicates=2)
        path = tmp_path / "other.jsonl"
        path.write_bytes(encode(header))
        return path

    checked_beside(home, RUN, (2, 3), asked("S2"), seed=here.seed)
    seeds = {literal.case(name="S1").full_name: (1,)}
    for request in (asked("S2", "S1"), asked("S1", seeds=seeds)):
        with pytest.raises(InputError, match=r"differs from this one in cases: both have \S+/S1, so they are not"):
            checked_beside(home, RUN, (2, 3), request, seed=here.seed)
        with pytest.raises(InputError, match=r"differ in cases: both have \S+/S1, .*: they are no one run"):
            import_journal(file(2, request), home)
    with pytest.raises(InputError, match="differs from this one in caches, deadline_s: measure"):
        checked_beside(home, RUN, (2, 3), asked("S2", caches=("hot",), deadline_s=9.0), seed=here.seed)
    with pytest.raises(InputError, match="differ in caches: they are no one run"):
        import_journal(file(2, asked("S2", caches=("hot",))), home)
    import_journal(shard(2), home)


def test_shards_of_two_plans_that_have_no_case_in_common_are_no_run(home, literal, tmp_path):
    """They would lack a case between them, and pass for whole. What does not say of what it was cut is taken."""

    def asked(number, cut):
        return Request(cases=(literal.case(name=f"S{number}"),), shard=(number, 3), cut=cut)

    def file(number, cut):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(encode(literal.header(run=RUN, request=asked(number, cut), replicates=2)))
        return path

    import_journal(file(1, "aaaa"), home)
    told = (
        "differs from this one in what all shards together have, so they are not cut from the same plan: measure"
    )
    with pytest.raises(InputError, match=told):
        checked_beside(home, RUN, (2, 3), asked(2, "bbbb"))
    with pytest.raises(InputError, match=r"differ in what all shards .* the same plan: they are no one run"):
        import_journal(file(2, "bbbb"), home)
    checked_beside(home, RUN, (2, 3), asked(2, ""))
    import_journal(file(2, "aaaa"), home)
    import_journal(file(3, ""), home)
    assert read(home.journal(RUN)).header.request.cut == ""


def test_a_run_says_which_of_its_shards_are_not_here(shard, home):
    for number, missing in ((2, "1/3, 3/3"), (3, "1/3"), (1, "")):
        import_journal(shard(number), home)
        joined = read(home.find(RUN))
        assert ", ".join(f"{i}/{n}" for i, n in joined.header.request.missing) == missing
        told = [x for x in warnings(joined, ()) if x.startswith("Incomplete")]
        assert told == [f"Incomplete: not here are shards {missing}; what was measured is shown."] * bool(missing)
    assert few([(x, 99) for x in range(1, 11)]) == "1/99, 2/99, 3/99, 4/99, 5/99, 6/99, 7/99, 8/99 and 2 more"


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


def test_a_shard_takes_nothing_from_a_run_that_came_whole(shard, home, tmp_path):
    for i in (1, 2, 3):
        import_journal(shard(i), home)
    whole = home.journal(RUN).read_bytes()
    (tmp_path / "whole.jsonl").write_bytes(whole)
    other = Home(tmp_path / "other")
    import_journal(tmp_path / "whole.jsonl", other)
    with pytest.raises(InputError, match="is here already, with 4 measurements that neither this shard nor"):
        import_journal(shard(1), other)
    assert other.journal(RUN).read_bytes() == whole


@pytest.fixture
def joined(shard, home, tmp_path):
    """The journal of a run that was joined from these of its shards, as exported from another home."""
    files = {i: shard(i) for i in (1, 2, 3)}

    def make(*numbers, **changes):
        name = "-".join(map(str, [*numbers, *changes]))
        other = Home(tmp_path / f"home-{name}")
        for i in numbers:
            import_journal(shard(i, **changes) if changes else files[i], other)
        return other.journal(RUN).rename(tmp_path / f"joined-{name}.jsonl")

    return make


def test_a_whole_run_takes_the_place_of_what_was_joined_of_some_of_its_shards(joined, home):
    """And never the other way round."""
    for numbers in ((2,), (2, 3), (1, 2, 3)):
        path = joined(*numbers)
        assert import_journal(path, home) == RUN
        assert home.journal(RUN).read_bytes() == path.read_bytes()
    for numbers in ((1,), (2, 3)):
        import_journal(joined(*numbers), home)
        assert home.journal(RUN).read_bytes() == path.read_bytes()


def test_joined_runs_of_which_neither_has_all_of_the_other_are_refused(joined, shard, home):
    here = joined(1, 2)
    import_journal(here, home)
    for other in (joined(2, 3), joined(1, 2, 3, seed=5), joined(1, 2, 3, commit="f" * 40)):
        with pytest.raises(InputError, match="is here already with other content from line 1 on"):
            import_journal(other, home)
    assert home.journal(RUN).read_bytes() == here.read_bytes()


def test_a_whole_run_does_not_stand_beside_some_of_its_shards(joined, shard, home):
    """Of which the next import would make its journal anew."""
    import_journal(shard(2), home)
    there = home.journal(RUN).read_bytes()
    with pytest.raises(InputError, match=rf"is here in shards, {RUN}.2-of-3.jsonl, and this has more.*Import the"):
        import_journal(joined(1, 2, 3), home)
    assert home.journal(RUN).read_bytes() == there


def test_control_and_boards_of_a_run_do_not_keep_the_whole_one_out(home, literal, tmp_path):
    """The control of the whole is another shard's, and boards are told where one shard went to a second one."""
    control = literal.case(name="C")

    def given(number):
        case = literal.case(name=f"S{number}")
        request = Request(
            cases=(case, control), implementations=("torch",), shard=(number, 2), control=control.full_name
        )
        header = literal.header(run=RUN, request=request, replicates=1, environment={BOARDS: f"board-{number}"})
        records = [literal.record("torch", float(number), case=x, replicate=0) for x in (case, control)]
        if number == 1:
            records[0] = replace(records[0], board="board-9")
        return Journal(header, tuple(records), (), (Footer("2026-11-22T00:00:00Z", 1.0, True, {}),))

    for name, numbers in (("part", (2,)), ("whole", (1, 2))):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(shards.whole([given(x) for x in numbers]))
        import_journal(path, home)
        assert home.journal(RUN).read_bytes() == path.read_bytes()
    assert {x.board for x in read(path).records} == {"board-1", "board-2", "board-9"}


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


def test_metrics_of_all_shards_are_joined_and_mean_one_thing(home, literal, tmp_path):
    loss = Metric("loss", "1")

    def file(number, primary, *metrics):
        case = literal.case(name=f"S{number}", primary=primary)
        request = Request(cases=(case,), implementations=("torch",), shard=(number, 3))
        header = literal.header(run=RUN, request=request, metrics=metrics)
        record = literal.record("torch", 2.0, case=case, beside={"loss": 2.0} if primary == "loss" else {})
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"".join(map(encode, [header, record])))
        return path

    import_journal(file(1, "latency", LATENCY), home)
    import_journal(file(2, "loss", LATENCY, loss), home)
    joined = read(home.find(RUN))
    assert joined.header.metrics == (LATENCY, loss)
    assert [x.metrics[x.primary].value for x in rows(joined)] == [2.0, 2.0]
    with pytest.raises(InputError, match="differ in metric 'loss': they are no one run"):
        import_journal(file(3, "loss", Metric("loss", "1", better="higher")), home)


def test_the_control_of_all_shards_stands_once_and_cases_say_their_host(shard, home, literal, tmp_path):
    control = literal.case(name="C")
    for number in (2, 1, 3):
        case = literal.case(name=f"S{number}")
        request = Request(
            cases=(case, control), implementations=("torch",), shard=(number, 3), control=f"{case.operator}/C"
        )
        environment = {} if number == 3 else {"host": f"h{number}"}
        header = literal.header(run=RUN, request=request, environment=environment)
        records = [literal.record("torch", float(number), case=x) for x in (case, control)]
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"".join(map(encode, [header, *records])))
        import_journal(path, home)
    journal = read(home.find(RUN))
    assert [(x.case.name, x.primary[0]) for x in journal.records] == [("S1", 1), ("C", 1), ("S2", 2), ("S3", 3)]
    hosts = {name.rpartition("/")[2]: host for name, host in journal.header.request.hosts.items()}
    assert hosts == {"S1": "h1", "C": "h1", "S2": "h2"}
    other = Home(tmp_path / "other")
    import_journal(tmp_path / "1.jsonl", other)
    with pytest.raises(InputError, match=r"differ in .*control: .*/C / None"):
        import_journal(shard(2), other)


def test_means_of_different_hosts_do_not_belong_together(home, literal):
    definitions = set()
    for i, hosts in enumerate(({}, {"h1"}, {"h2"}, {"h1"})):
        case = literal.case(name="S")
        request = Request(cases=(case,), hosts={f"{case.operator}/S": x for x in hosts})
        header = literal.header(run=f"2026112{i}-000000-aaaa", request=request, commit="a" * 40)
        path = home.journal(header.run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(encode, [header, literal.record("torch", 1.0, case=case)])))
    index = Index(home)
    for entry in index.runs():
        definitions |= {x.definition for x in index.processes(entry).values()}
    assert len(definitions) == 3


def test_a_shard_that_went_over_to_another_board_is_told_apart(literal):
    shards = []
    for number in (1, 2):
        case = literal.case(name=f"S{number}")
        request = Request(cases=(case,), implementations=("torch",), shard=(number, 2))
        header = literal.header(run=RUN, request=request, replicates=2, environment={BOARDS: f"b{number}"})
        records = tuple(literal.record("torch", 1.0, case=case, replicate=r) for r in (0, 1))
        shards.append(Journal(header, records, (Ceiling("copy", 8, 0.5, 0),), (literal.footer(),)))
    assert all(x.board is UNSET for x in join(shards).records)  # as ever, where none went over
    first, second = shards[1].records
    shards[1] = dataclasses.replace(shards[1], records=(first, replace(second, board="b1")))
    joined = join(shards)
    assert [x.board for x in joined.records] == ["b1", "b1", "b2", "b1"]
    assert [x.board for x in joined.ceilings] == ["b1", "b2"]
    assert boards(joined.header, joined.records) == {"b1", "b2"}


def test_seeds_of_a_case_come_from_several_shards(home, literal, tmp_path):
    case, other = literal.case(name="S"), literal.case(name="T")
    seeds = {1: (0, 2), 2: (1,)}
    for number, numbers in seeds.items():
        cases = (case, other) if number == 2 else (case,)
        request = Request(
            cases=cases, implementations=("torch",), shard=(number, 2), seeds={case.full_name: numbers}
        )
        environment = {BOARDS: f"b{number}", "host": f"h{number}"}
        header = literal.header(run=RUN, request=request, replicates=3, environment=environment)
        records = [literal.record("torch", 1.0 + x, case=case, replicate=x) for x in numbers]
        records += [literal.record("torch", 9.0, case=x, replicate=r) for x in cases[1:] for r in (0, 1, 2)]
        footer = Footer("2026-11-22T00:00:00Z", 10.0, True, {"sample": 5.0})
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b"".join(map(encode, [header, *records, footer])))
        import_journal(path, home)
    journal = read(home.find(RUN))
    request = journal.header.request
    assert [x.name for x in request.cases] == ["S", "T"]
    assert (request.seeds, request.shard) == ({}, None)
    assert [(x.replicate, x.board) for x in journal.records if x.case.name == "S"] == [
        (0, "b1"), (2, "b1"), (1, "b2"),
    ]  # fmt: skip
    assert request.hosts[other.full_name] == "h2"
    # One name for both hosts, that no host has: what they measured belongs together with what both did again.
    assert re.fullmatch("hosts_[0-9a-f]{12}", request.hosts[case.full_name])
    (entry,) = Index(home).runs()
    values = {key.case: x for key, x in Index(home).processes(entry).items()}
    assert values["S"].values == (1.0, 2.0, 3.0)
    assert values["S"].definition.endswith(f"{request.hosts[case.full_name]}/b1/b2")
    assert values["T"].definition.endswith("/h2")
    assert journal.footers[-1].complete
