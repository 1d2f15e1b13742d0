"""From deliveries to a whole run: what is lost, torn, double or of another run, with an engine that is none."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock
from kernelmark.registry.errors import HarnessError, InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import encode, read
from kernelmark.registry.store.record import Case, Footer, Header, Measurement, Record, Request
from kernelmark.suite.container.session import Taken
from kernelmark.suite.fleet import order as orders
from kernelmark.suite.fleet.collect import collect, deliveries_of, waiting
from kernelmark.suite.fleet.delivery import NOTE, Delivery, digest, write
from kernelmark.suite.fleet.drive import CANCELLED, Cancelled, drive
from kernelmark.suite.fleet.dropping import drop
from kernelmark.suite.fleet.engine import EngineError
from kernelmark.suite.fleet.order import Order

RUN = "20261122-000000-aaaa"
ORDER = Order(RUN, "ray", 3, "tiny", "cpu", 1, (1.0, 1.0, 2.0), "salt")


def journal(shard: int, ms: float = 1.0, complete: bool = True, **changes) -> bytes:
    """Of one case and one row."""
    case = Case("double", f"N{shard}", {"N": shard}, {}, "fp32", "forward", "spec", 8, 0)
    request = Request(cases=(case,), implementations=("plain",), shard=(shard, ORDER.shards))
    facts = {"commit": "a" * 40, "key": "k", "environment": {"host": f"h{shard}"}, "run": RUN} | changes
    header = Header(
        schema_version=2,
        created="2026-11-22T00:00:00+00:00",
        harness="0.1.0",
        dirty=False,
        plan="tiny",
        seed=1,
        replicates=1,
        device="cpu",
        conditions={},
        request=request,
        **facts,
    )
    measured = Measurement(samples={"latency": (ms,) * 6}, timer="monotonic")
    record = Record(case, "plain", "plain", None, 0, 0, "hot", "ok", measurement=measured)
    lines = [header, record, Footer("2026-11-22T00:00:01+00:00", 10.0, complete, {})]
    return b"".join(map(encode, lines))


class Hosts:
    """An engine whose hosts do what they are told, shard by shard and attempt by attempt."""

    def __init__(self, home: Home, *script: dict[int, object]) -> None:
        self.folder, self.script = deliveries_of(home, RUN), list(script)
        self.asked: list[list[int]] = []
        self.ended, self.last = False, ""

    def submit(self, shards) -> None:
        self.asked.append(list(shards))
        behaviour = self.script.pop(0) if self.script else {}
        for shard in shards:
            what = behaviour.get(shard, b"")
            if what is None:
                continue
            if isinstance(what, int):
                deliver(self.folder, shard, None, code=what)
            else:
                deliver(self.folder, shard, what or journal(shard))

    def held(self) -> dict[int, str]:
        return {}

    def said(self, shard: int) -> str:
        return self.last

    def cancel(self) -> None:
        self.ended = True


def deliver(folder: Path, shard: int, data: bytes | None, code: int = 0, run: str = RUN) -> Path:
    contents = {} if data is None else {"journal.jsonl": data}
    files = {name: digest(x) for name, x in contents.items()}
    path = folder / f"{shard}-{os.urandom(4).hex()}"
    folder.mkdir(parents=True, exist_ok=True)
    write(path, Delivery(run, (shard, ORDER.shards), f"h{shard}", code, files, "the last line\n"), contents)
    return path


@pytest.fixture
def home(tmp_path) -> Home:
    home = Home(tmp_path / "home")
    orders.save(ORDER, home)
    return home


def go(home: Home, engine: Hosts, attempts: int = 3):
    told = []
    state = drive(ORDER, home, engine, lambda *x: told.append(x), attempts, sleep=lambda _: None)
    return state, [y.reason for _, _, refused in told for y in refused]


def values(home: Home) -> dict[str, float]:
    return {x.case.name: x.primary[0] for x in read(home.find(RUN)).records}


def test_what_is_lost_or_not_whole_is_asked_for_again(home):
    torn = journal(3)[:-40]
    engine = Hosts(home, {2: None, 3: torn}, {2: journal(2, complete=False)}, {2: journal(2, ms=7.0)})
    state, refused = go(home, engine)
    assert engine.asked == [[1, 2, 3], [2, 3], [2]]
    assert refused == ["it ended with exit code 0: the last line"] * 2
    assert state.missing == ()
    assert values(home) == {"N1": 1.0, "N2": 7.0, "N3": 1.0}
    assert read(home.find(RUN)).footers[-1].complete


def test_a_driver_that_starts_anew_asks_for_the_rest_only(home):
    with pytest.raises(HarnessError, match="shard 2/3 was asked for 1 times"):
        go(home, Hosts(home, {2: None}), attempts=1)
    again = Hosts(home)
    go(home, again)
    assert again.asked == [[2]]


def test_what_was_kept_and_not_joined_is_joined_by_who_collects_again(home):
    go(home, Hosts(home))
    whole = home.journal(RUN).read_bytes()
    home.journal(RUN).write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))  # killed before the last join
    os.utime(home.journal(RUN), (1, 1))
    collect(ORDER, home)
    assert home.journal(RUN).read_bytes() == whole


def test_the_first_of_two_deliveries_counts(home):
    go(home, Hosts(home))
    deliver(deliveries_of(home, RUN), 2, journal(2, ms=9.0))
    for _ in range(2):
        told = []
        state = collect(ORDER, home, tell=lambda what, share, told=told: told.append(share))
        assert (state.missing, state.duplicates) == ((), 1)
        assert told == [0, 0.25, 0.5, 0.75]
        assert values(home)["N2"] == 1.0


def test_shards_of_other_conditions_are_not_pooled(home):
    engine = Hosts(home, {2: journal(2, commit="b" * 40)}, {}, {})
    _, refused = go(home, engine)
    assert engine.asked == [[1, 2, 3], [2]]
    assert refused == [f"shards of run {RUN} differ in commit: they are no one run."]


def test_what_was_taken_out_counts_no_more_and_is_asked_for_again(home):
    go(home, Hosts(home, {2: journal(2, ms=9.0)}))
    (kept,) = drop(ORDER, home, [2, 2])
    assert kept.read_bytes() == journal(2, ms=9.0)
    assert values(home) == {"N1": 1.0, "N3": 1.0}
    assert not read(home.find(RUN)).footers[-1].complete
    assert collect(ORDER, home).missing == (2,)
    deliver(deliveries_of(home, RUN), 2, journal(2, ms=9.0))  # the same again
    assert collect(ORDER, home).missing == (2,)
    engine = Hosts(home, {2: journal(2, ms=3.0)})
    state, refused = go(home, engine)
    assert (engine.asked, refused, state.missing) == ([[2]], [], ())
    assert values(home) == {"N1": 1.0, "N2": 3.0, "N3": 1.0}


def test_a_shard_unlike_the_others_makes_room_for_them(home):
    deliver(deliveries_of(home, RUN), 1, journal(1, key="another driver"))
    assert collect(ORDER, home).missing == (2, 3)
    for shard in (2, 3):
        deliver(deliveries_of(home, RUN), shard, journal(shard))
    assert [x.shard for x in collect(ORDER, home).refused] == [2, 3]
    drop(ORDER, home, [1])
    assert not home.journal(RUN).exists()
    state = collect(ORDER, home)
    assert (state.missing, state.refused) == ((1,), ())
    assert values(home) == {"N2": 1.0, "N3": 1.0}


@pytest.mark.parametrize("moves", range(4))
def test_what_is_killed_while_it_takes_shards_out_leaves_the_others_none_in_their_way(home, moves, monkeypatch):
    """After so many files: the run's journal never has what no shard has any more."""
    for shard in (1, 2):
        deliver(deliveries_of(home, RUN), shard, journal(shard, key="another driver"))
    collect(ORDER, home)
    left = iter(range(moves))

    def killed(*given, do=os.replace):
        if next(left, None) is None:
            raise KeyboardInterrupt
        do(*given)

    with monkeypatch.context() as patch:
        patch.setattr("kernelmark.suite.fleet.dropping.os.replace", killed)
        patch.setattr("kernelmark.suite.fleet.dropping.join", killed)
        if moves < 3:
            with pytest.raises(KeyboardInterrupt):
                drop(ORDER, home, [1, 2])
        else:  # none stays that could be joined
            drop(ORDER, home, [1, 2])
    there = [1, 2][max(0, moves - 1) :]
    assert [x.shard for x in collect(ORDER, home).whole] == there
    if there:
        assert values(home) == {f"N{x}": 1.0 for x in there}
        drop(ORDER, home, there)
    deliver(deliveries_of(home, RUN), 3, journal(3))
    state = collect(ORDER, home)
    assert (state.missing, state.refused) == ((1, 2), ())
    assert values(home) == {"N3": 1.0}


def test_what_is_killed_before_it_joins_is_joined_by_who_collects(home, monkeypatch):
    go(home, Hosts(home))
    with monkeypatch.context() as patch:
        patch.setattr("kernelmark.suite.fleet.dropping.join", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drop(ORDER, home, [2])
    assert collect(ORDER, home).missing == (2,)
    assert values(home) == {"N1": 1.0, "N3": 1.0}


def test_a_compressed_journal_of_the_run_goes_with_its_shards(home):
    """It would have what no shard has, and all others be refused; it is kept."""
    deliver(deliveries_of(home, RUN), 1, journal(1, key="another driver"))
    collect(ORDER, home)
    joined = home.journal(RUN)
    joined.with_name(f"{joined.name}.gz").write_bytes(gzip.compress(joined.read_bytes(), mtime=0))
    joined.unlink()
    (kept,) = drop(ORDER, home, [1])
    assert home.paths() == {}
    assert [x.case.name for x in read(kept.with_name("whole.jsonl.gz")).records] == ["N1"]
    deliver(deliveries_of(home, RUN), 2, journal(2))
    state = collect(ORDER, home)
    assert (state.missing, state.refused) == ((1, 3), ())
    assert values(home) == {"N2": 1.0}


def test_only_what_is_here_is_taken_out(home):
    with pytest.raises(InputError, match=r"shard 1 is not here; none is\."):
        drop(ORDER, home, [1])
    deliver(deliveries_of(home, RUN), 3, journal(3))
    collect(ORDER, home)
    with pytest.raises(InputError, match=r"shard 4 is not here; these are: 3\."):
        drop(ORDER, home, [3, 4])
    assert values(home) == {"N3": 1.0}
    with FileLock(orders.folder_of(home, RUN) / "driver.lock"), pytest.raises(InputError, match="fleet cancel"):
        drop(ORDER, home, [3])


def test_wrong_input_is_not_asked_for_again(home):
    engine = Hosts(home, {2: 2})
    with pytest.raises(InputError, match="shard 2/3: it ended with exit code 2: the last line"):
        go(home, engine)
    assert engine.asked == [[1, 2, 3]]
    assert engine.ended


def test_attempts_have_an_end(home):
    engine = Hosts(home, {3: 5}, {3: None}, {3: 5})
    told = "shard 3/3 was asked for 3 times .* h3: it ended with exit code 5: .* fleet run --resume"
    with pytest.raises(HarnessError, match=told):
        go(home, engine)
    assert engine.ended
    assert set(values(home)) == {"N1", "N2"}


def test_what_nobody_has_taken_in_yet_is_told(home):
    folder = deliveries_of(home, RUN)
    deliver(folder, 1, journal(1))
    deliver(folder, 2, journal(2, complete=False))
    deliver(folder, 3, None, code=5)
    deliver(folder, 3, b"torn")
    assert waiting(ORDER, home) == {1: "delivered"}


def test_why_nothing_came_back_is_what_its_task_said(home):
    engine = Hosts(home, {3: None})
    engine.last = "No space left on device (/shared/log-3.txt)"
    with pytest.raises(
        HarnessError, match=r"nothing came back: No space left on device \(/shared/log-3.txt\)\. Go"
    ):
        go(home, engine, attempts=1)


@pytest.mark.parametrize(
    ("code", "said"), [(143, "it was ended by SIGTERM before it was whole"), (139, "exit code")]
)
def test_a_shard_whose_host_was_taken_back_says_no_more_than_that(home, code, said):
    """Its log says to go on in a folder that went with it."""
    with pytest.raises(HarnessError) as raised:
        go(home, Hosts(home, {3: code}), attempts=1)
    assert said in str(raised.value)
    assert ("the last line" in str(raised.value)) == (code == 139)


def test_a_controller_that_does_not_answer_ends_the_driver_alone(home):
    engine = Hosts(home)
    engine.held = mute
    with pytest.raises(EngineError, match=f"squeue: no answer. Go on with: kernelmark fleet run --resume {RUN}"):
        go(home, engine)
    assert not engine.ended


def mute() -> dict[int, str]:
    raise EngineError("squeue: no answer")


def test_a_second_driver_takes_no_cancelling_back(home):
    with FileLock(orders.folder_of(home, RUN) / "driver.lock"):
        (orders.folder_of(home, RUN) / CANCELLED).touch()
        with pytest.raises(InputError, match="is driven by another process"):
            go(home, Hosts(home))
    assert (orders.folder_of(home, RUN) / CANCELLED).exists()


def test_what_a_full_disk_cut_off_is_not_there(home, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    newer = msgspec.structs.replace(ORDER, run="20261123-000000-aaaa")
    for write_it in (
        lambda: orders.save(newer, home),
        lambda: orders.salt(home, {}),
        lambda: deliver(tmp_path / "deliveries", 1, journal(1)),
    ):
        with pytest.raises(OSError, match="No space left"):
            write_it()
    assert orders.load(home, "latest") == ORDER
    assert not [
        x
        for x in home.folder.rglob("*")
        if x.name.startswith((".order", "salt", ".salt")) and ".lock" not in x.name
    ]
    assert not list((tmp_path / "deliveries").iterdir())


def test_the_secret_of_a_home_is_never_empty(home):
    (home.folder / "fleet" / "salt").touch()  # its disk was full
    first = orders.salt(home, {})
    assert len(first) == 32
    assert orders.salt(home, {}) == first


def test_a_run_that_is_cancelled_ends(home):
    class Later(Hosts):
        def submit(self, shards) -> None:
            super().submit(shards)
            (orders.folder_of(home, RUN) / CANCELLED).touch()

    engine = Later(home, {1: None, 2: None, 3: None})
    with pytest.raises(Cancelled, match="was cancelled. Go on with"):
        go(home, engine)
    assert engine.ended


@pytest.mark.parametrize("how", ["changed", "name", "link", "note", "run", "shard"])
def test_what_was_not_delivered_so_is_not_taken_in(home, how):
    folder = deliveries_of(home, RUN)
    path = deliver(folder, 1, journal(1), run="other" if how == "run" else RUN)
    note = path / NOTE
    if how == "changed":
        (path / "journal.jsonl").write_bytes(journal(1, ms=2.0))
    elif how == "name":
        note.write_bytes(note.read_bytes().replace(b"journal.jsonl", b"../../x.jsonl"))
    elif how == "link":
        (path / "journal.jsonl").unlink()
        (path / "journal.jsonl").symlink_to("/etc/hostname")
    elif how == "note":
        note.write_bytes(b"{}")
    elif how == "shard":
        note.write_bytes(note.read_bytes().replace(b"[1,3]", b"[2,3]"))
    state = collect(ORDER, home)
    assert len(state.refused) == 1
    assert state.missing == (1, 2, 3)
    assert not home.runs()


def test_no_two_runs_of_one_name_and_none_that_is_not_there(home):
    with pytest.raises(InputError, match=f"is on a fleet already; go on with: .* --resume {RUN}"):
        orders.save(ORDER, home)
    with pytest.raises(InputError, match=f"unknown run on a fleet 'x'. Known: latest, {RUN}"):
        orders.load(home, "x")
    assert orders.load(home, "latest") == ORDER


def test_a_container_brings_its_shard_and_not_the_run_as_it_saw_it(tmp_path):
    folder, home = tmp_path / "container", Home(tmp_path / "home")
    for name, shard in (("shards/r.2-of-3.jsonl", 2), ("r.jsonl", 3)):
        path = folder / "journals" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(journal(shard))
    taken = Taken()
    taken.take(folder, home)
    assert (taken.runs, taken.refused) == ([RUN], [])
    assert [x.name for x in home.shards.glob("*.jsonl")] == [f"{RUN}.2-of-3.jsonl"]


def test_why_it_ends_is_one_sentence(home):
    other = {2: journal(2, commit="b" * 40)}
    with pytest.raises(HarnessError, match=r"differ in commit: they are no one run\. Go on with: "):
        go(home, Hosts(home, other, other), attempts=2)
