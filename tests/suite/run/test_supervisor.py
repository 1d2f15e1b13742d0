"""Real worker processes on the CPU: every way a cell can end, and every way a run can be cut short."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
from kernelmark.registry.analysis.rows import described, rows
from kernelmark.registry.errors import HarnessError, InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Journal, Writer, encode, read
from kernelmark.registry.store.processes import process_values
from kernelmark.registry.store.record import BOARDS, Header, Measurement, Record, Request, boards
from kernelmark.registry.views.summary import warnings
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.run import supervisor
from kernelmark.suite.run.forkserver import ForkServers
from kernelmark.suite.run.listener import Silent
from kernelmark.suite.run.process import OutOfTime
from kernelmark.suite.run.supervisor import Interrupted, NotResumable, Run
from msgspec import UNSET


@pytest.fixture
def make(root, plan_file, tmp_path):
    """A run of `double`, without ceilings."""

    def run(N=(16,), implementations=("plain",), replicates=1, deadline_s=60.0, told=(), **fields):
        catalog = Catalog.of(root)
        path = plan_file(list(N), replicates, deadline_s)
        for before, after in told:
            path.write_text(path.read_text().replace(before, after))
        plan = plans.load(str(path), catalog, "cpu")
        return Run(
            plan,
            plan.cells(catalog, "cpu", implementations),
            catalog,
            "cpu",
            Home(tmp_path / "home"),
            seed=1,
            name="20261121-000000-aaaa",
            roots=(str(root),),
            ceilings=False,
            **fields,
        )

    return run


def kinds(path: Path) -> Counter[str]:
    return Counter(json.loads(line)["kind"] for line in path.read_text().splitlines())


TOKEN = """token=$(sed 's/.*"token":"\\([^"]*\\)".*/\\1/')\n"""
"""For a script that stands for a worker: what each of its messages begins with."""
SPENT = {"spent_s": {"verify": 0.5}}


def identities(path: Path) -> list[tuple[object, ...]]:
    """Of every record line as it stands in the file: reading a journal would leave out repetitions."""
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    return [
        (x["case"]["name"], x["implementation"], x["cache"], x["replicate"])
        for x in lines
        if x["kind"] == "record"
    ]


def test_each_end_is_a_status_and_costs_its_cell_only(make, root, told, processes):
    names = ("plain", "wrong", "killed", "hangs", "leaves", "hoards", "fails", "unable", "copy", "absent")
    path = make(implementations=names, replicates=2, deadline_s=5, listener=told).execute()
    journal = read(path)
    first = {x.implementation: (x.status, x.reason) for x in journal.records if x.replicate == 0}
    assert first == {
        "plain": ("ok", None),
        "copy": ("ok", None),
        "wrong": ("incorrect", "verify: output: relative error 0.05, allowed 1e-05"),
        "killed": ("crashed", "verify: its process was ended by SIGKILL"),
        "hangs": ("timeout", "verify: not finished within 5 s, at many.py:32 hangs"),
        "leaves": ("crashed", "verify: its process ended with exit code 3"),
        "hoards": ("out_of_memory", first["hoards"][1]),
        "fails": ("error", "verify: ValueError: no such luck"),
        "unable": ("unsupported", "build: only on Sundays"),
        "absent": ("unavailable", "no-such-distribution is not installed: pip install no-such-distribution"),
    }
    # What is settled is not tried again; a wrong answer is.
    assert {x.implementation for x in journal.records if x.replicate == 1} == {"plain", "wrong", "copy"}
    assert len(identities(path)) == len(set(identities(path))) == 13
    assert told.begun == [(18, 0)]  # all but the one that is not installed
    assert told.ended == sorted(journal.records, key=told.ended.index)
    assert "sample plain" in told.stages
    helpers = [int(x) for x in (root / "baselines" / "helpers").read_text().split()]
    assert len(helpers) == 2
    processes.wait_for(lambda: not any(map(processes.alive, helpers)), "the workers' helpers to end")
    (footer,) = journal.footers
    assert footer.complete
    assert {"start", "build", "verify", "sample", "overhead"} <= footer.spent_s.keys()
    assert 5 < footer.wall_s < 120
    assert not path.with_suffix(".lock").exists()
    plain = next(x for x in journal.records if x.implementation == "plain")
    assert len(plain.primary) == 6
    assert plain.measurement.timer == "monotonic"
    assert journal.header.request.implementations == tuple(sorted(names))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 7", "ended with exit code 7. It said nothing."),
        ("echo one; echo two >&2; exit 1", "ended with exit code 1. It said: one | two"),
        ("sleep 60", "not finished within 0.5 s. It said nothing."),
    ],
)
def test_a_worker_that_cannot_start(make, tmp_path, monkeypatch, script, said):
    monkeypatch.setattr(supervisor, "START_DEADLINE_S", 0.5 if "sleep" in script else 60.0)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    run = make(python=lambda environment: python)
    with pytest.raises(HarnessError, match="the worker could not start") as error:
        run.execute()
    assert str(error.value).endswith(said)
    assert Home(run.home.folder).runs() == []  # an empty journal would be in the way of `show latest`


def test_another_kernelmark_measures_nothing(make, monkeypatch):
    """An environment has a kernelmark of its own, which may be another commit's."""
    monkeypatch.setattr(supervisor.own_code, "digest", lambda: "another's")
    run = make()
    with pytest.raises(HarnessError, match="the worker could not start") as error:
        run.execute()
    assert "is not what the run began with: install that one here" in str(error.value)
    assert Home(run.home.folder).runs() == []


def test_a_worker_that_ends_between_cells_for_ever_is_not_started_for_ever(make, tmp_path, monkeypatch):
    facts = json.dumps({"message": "facts", "conditions": {"threads": 1}})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{TOKEN}echo \"$token\"'{facts}' >/dev/fd/$3\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    run = make(python=lambda environment: python)
    with pytest.raises(HarnessError, match="the worker made no progress") as error:
        run.execute()
    again = f"kernelmark run --resume 20261121-000000-aaaa --output {run.home.folder}"
    assert str(error.value).endswith(again)
    monkeypatch.setenv("KERNELMARK_HOME", str(run.home.folder))
    assert run.again == "kernelmark run --resume 20261121-000000-aaaa"
    assert not read(run.path).footers[0].complete


def test_a_worker_that_cannot_start_for_a_run_that_goes_on_says_why_and_leaves_its_journal(make, tmp_path):
    run = make()
    written(run, header_of(run))
    before = run.path.read_bytes()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'AssertionError: Torch not compiled with CUDA enabled'; exit 1\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    again = supervisor.resume("latest", run.home, run.catalog, Silent())
    again.python = lambda environment: python
    with pytest.raises(
        HarnessError, match=r"no progress: its process ended with exit code 1\. It said: Assert"
    ) as e:
        again.execute()
    assert "Torch not compiled with CUDA enabled. Its output is in " in str(e.value)
    assert run.path.read_bytes() == before


def test_the_command_that_goes_on_is_for_a_shell(make, tmp_path):
    run = replace(make(), home=Home(tmp_path / "my home"))
    assert shlex.split(run.again)[-1] == str(tmp_path / "my home")
    run.request = Request(shard=(1, 2))
    assert shlex.split(run.again)[3] == str(run.path)


def test_a_run_in_a_container_goes_on_in_its_image(make, monkeypatch):
    run = make()
    monkeypatch.setenv("KERNELMARK_HOME", str(run.home.folder))
    monkeypatch.setenv(
        "KERNELMARK_IMAGE_DIGEST", "sha256:0123"
    )  # a fleet sets this one too, and launches otherwise
    assert run.again == "kernelmark run --resume 20261121-000000-aaaa"
    monkeypatch.setenv("KERNELMARK_IMAGE", "cpu")
    assert run.again == "kernelmark bench sha256:0123 --resume 20261121-000000-aaaa"
    monkeypatch.setenv("KERNELMARK_IMAGES", "core=sha256:4567 onnx=sha256:89ab")
    assert run.again == "kernelmark run --resume 20261121-000000-aaaa"


def test_a_context_that_breaks_costs_the_cell_that_broke_it(make, tmp_path):
    """The worker says so and leaves; another one takes the rest. A script stands for it: no GPU is here."""
    run = make(N=(16, 32, 64))
    said = [json.dumps({"message": "facts", "conditions": {"threads": 1}})]
    ends = [
        json.dumps(
            {"message": "result", "index": i, "status": "error", "reason": why, "measurement": None} | SPENT
        )
        for i, why in enumerate(["sample: misaligned address", "verify: no", "verify: no"])
    ]
    done = json.dumps({"message": "done"} | SPENT)
    first, second = (" ".join(f"'{x}'" for x in y) for y in ([*said, ends[0]], [*said, *ends[1:], done]))
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\n{TOKEN}"
        f'say() {{ for x in "$@"; do echo "$token$x"; done; }}\n'
        f"if mkdir {tmp_path}/once; then say {first} >/dev/fd/$3; exit 70; fi\n"
        f"say {second} >/dev/fd/$3\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    run.python = lambda environment: python
    journal = read(run.execute())
    assert [x.reason for x in journal.records] == ["sample: misaligned address", "verify: no", "verify: no"]
    assert [x.position for x in journal.records] == [0, 1, 2]
    assert journal.footers[0].complete


def test_two_at_once(make):
    run = make()
    run.home.journals.mkdir(parents=True)
    with filelock.FileLock(run.path.with_suffix(".lock")):
        for _ in range(2):  # the first refusal must not take the lock away
            with pytest.raises(InputError, match="is being measured by another process"):
                make().execute()
            assert run.path.with_suffix(".lock").exists()


def header_of(run: Run, **changes) -> Header:
    commit, dirty = supervisor.fingerprint.commit(run.source)
    fields = {
        "schema_version": 2,
        "run": run.name,
        "created": "2026-11-21T00:00:00Z",
        "harness": "0.1.0",
        "commit": commit,
        "dirty": dirty,
        "plan": "tiny",
        "seed": 1,
        "replicates": run.plan.replicates,
        "device": "cpu",
        "key": "k",
        "conditions": {},
        "environment": {},
        "request": run.plan.request(run.cells),
    }
    return Header(**(fields | changes))


def written(run: Run, *lines) -> None:
    with Writer(run.path) as writer:
        for line in lines:
            writer.write(line)


def test_resume_of_nothing_that_can_go_on(make, tmp_path):
    run = make()
    catalog, home = run.catalog, run.home
    with pytest.raises(InputError, match="no runs in"):
        supervisor.resume("nonsense", home, catalog, Silent())
    written(run, header_of(run))
    with pytest.raises(InputError, match="unknown run 'nonsense'.*Known: latest, 20261121-000000-aaaa"):
        supervisor.resume("nonsense", home, catalog, Silent())
    resumed = supervisor.resume("latest", home, catalog, Silent())
    assert (resumed.plan.cases, resumed.cells, resumed.plan.sampling) == (
        run.plan.cases,
        run.cells,
        run.plan.sampling,
    )
    # A journal elsewhere: going on would write into another file than the one that was read.
    elsewhere = tmp_path / "elsewhere.jsonl"
    elsewhere.write_bytes(run.path.read_bytes())
    with pytest.raises(InputError, match="is not in"):
        supervisor.resume(str(elsewhere), home, catalog, Silent())
    run.path.write_bytes(encode(header_of(run, request=Request())))
    with pytest.raises(InputError, match="does not say what it measured"):
        supervisor.resume("latest", home, catalog, Silent())
    run.path.rename(run.path.with_suffix(".jsonl.gz"))
    with pytest.raises(InputError, match="is compressed; unpack it first"):
        supervisor.resume("latest", home, catalog, Silent())


def test_resume_on_a_machine_without_the_runs_device(make, monkeypatch):
    run = make()
    written(run, header_of(run, device="cuda"))
    before = run.path.read_bytes()
    monkeypatch.setattr(supervisor.fingerprint, "devices_here", lambda: ["cpu"])
    with pytest.raises(
        InputError, match=r"on device 'cuda', which is not here\. Here: cpu\. Go on with it on"
    ) as e:
        supervisor.resume("latest", run.home, run.catalog, Silent(), any_board=True)
    assert e.value.exit_code == 2
    assert run.path.read_bytes() == before


def test_a_resumed_run_forks_its_workers_if_it_did_before(make):
    run, servers = make(), ForkServers()
    written(run, header_of(run))
    assert supervisor.resume("latest", run.home, run.catalog, Silent(), servers).servers is None
    run.path.write_bytes(encode(header_of(run, environment={supervisor.WORKERS: "forked from a loaded torch"})))
    assert supervisor.resume("latest", run.home, run.catalog, Silent(), servers).servers is servers


def test_resume_after_the_operator_was_changed(make, root):
    run = make()
    written(run, header_of(run))
    path = root / "operators" / "double.py"
    path.write_text(path.read_text().replace("return x * 2", "return x + x"))
    supervisor.resume("latest", run.home, run.catalog, Silent())  # of a catalog that read the file before
    os.rename(root, root.with_name("moved"))
    with pytest.raises(NotResumable, match="operator double was changed since run"):
        supervisor.resume("latest", run.home, Catalog.of(root.with_name("moved")), Silent())
    assert NotResumable.exit_code == 4


def test_resume_of_a_clean_tree_in_one_with_changes(make, monkeypatch):
    """The header says of all rows that their commit is what was measured."""
    monkeypatch.setattr(supervisor.fingerprint, "conditions", lambda device, facts: {})
    run = make(commit=("c" * 40, True))
    run.past = Journal(header_of(run, commit="c" * 40, dirty=True))
    run._header({}, None)
    run.past = Journal(header_of(run, commit="c" * 40, dirty=False))
    with pytest.raises(NotResumable, match="conditions changed: commit: uncommitted changes now, and none then"):
        run._header({}, None)


def test_a_shard_that_is_none_of_the_runs_that_are_here_measures_nothing(make):
    run = make(request=Request(shard=(2, 2)), commit=("c" * 40, False))
    there = run.plan.request([], Request(shard=(1, 2)))
    conditions = supervisor.fingerprint.conditions("cpu", {})
    same = {
        "plan": run.plan.name,
        "key": supervisor.fingerprint.key(conditions),
        "harness": supervisor.__version__,
    }
    path = run.path.with_name(run.path.name.replace("2-of-2", "1-of-2"))
    for dirty, told in ((False, "cases: both have double/"), (True, "dirty, cases")):
        with Writer(path) as writer:
            writer.write(
                header_of(run, **same, request=there, commit="c" * 40, dirty=dirty, conditions=conditions)
            )
        with pytest.raises(InputError, match=rf"differs from this one in {told}.*Nothing was measured"):
            run._header({}, None)
        assert not run.path.exists()
        path.unlink()


def test_resume_on_another_gpu_of_the_same_kind(make, monkeypatch):
    run = make()
    run.device = "cuda"
    monkeypatch.setattr(supervisor.fingerprint.Nvml, "open", classmethod(lambda cls, uuid=None: None))
    with run.session():
        run._header({"gpu": "H", "gpu_uuids": "uuid-of-one-0"}, None)
        run._header({"gpu": "H", "gpu_uuids": "uuid-of-one-0"}, None)
        with pytest.raises(NotResumable, match="conditions changed: GPU: another board than then"):
            run._header({"gpu": "H", "gpu_uuids": "uuid-of-one-1"}, None)
        assert "uuid-of-one" not in run.path.read_text()


def test_resume_of_a_journal_that_does_not_say_which_gpu_it_was(make, monkeypatch):
    run = make()
    monkeypatch.setattr(supervisor.fingerprint, "conditions", lambda device, facts: {})
    run.past = Journal(header_of(run))
    run._header({"gpu_uuids": "aaaa-1"}, None)


@pytest.fixture
def board(monkeypatch):
    """The board that workers are on, of which a CPU has none: `board.append` puts another one in."""
    boards = ["aaaa"]
    noted = supervisor.fingerprint.environment
    monkeypatch.setattr(supervisor.fingerprint, "boards", lambda facts: {BOARDS: boards[-1]} if boards[-1] else {})
    monkeypatch.setattr(
        supervisor.fingerprint,
        "environment",
        lambda *given: noted(*given) | ({BOARDS: boards[-1]} if boards[-1] else {}),
    )
    return boards


def killed_after(path: Path, records: int) -> None:
    """Leaves of a journal what SIGKILL would have, that many records later: no footer."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [x for x in lines if json.loads(x)["kind"] == "record"][:records]
    path.write_bytes(b"".join([lines[0], *kept]))


def resumed(run: Run, **how) -> Run:
    again = supervisor.resume("latest", run.home, run.catalog, Silent(), **how)
    again.roots, again.ceilings = run.roots, False
    return again


def test_a_killed_run_goes_on_on_another_board_if_that_is_asked_for(make, board):
    run = make(implementations=("plain", "copy"), replicates=2)
    killed_after(run.execute(), 1)
    board.append("bbbb")
    with pytest.raises(NotResumable, match="another board than then.*--any-board goes on with this one"):
        resumed(run).execute()
    again = resumed(run, any_board=True)
    journal = read(again.execute())
    assert [x.board for x in journal.records] == [UNSET, "bbbb", "bbbb", "bbbb"]
    assert b'"board"' not in encode(journal.records[0])
    # What was left of a case in a replicate stands beside a row of the other board, and says so.
    said = [supervisor.ELSEWHERE in x.measurement.remarks for x in journal.records]
    assert said == [False, True, False, False]
    assert f"{journal.records[1].implementation}: {supervisor.ELSEWHERE}." in warnings(journal, rows(journal))
    assert again.again.endswith(" --any-board")
    # One row has a process on each, the other has both on the second.
    first, second = (x.identity for x in journal.records[:2])
    found = process_values(journal.header, journal.records)
    assert found[first].count == found[second].count == 2
    assert "/aaaa/bbbb" in found[first].definition
    assert "bbbb" not in found[second].definition
    assert described(journal)["boards"] == ["aaaa", "bbbb"]
    assert any("Measured on 2 boards" in x for x in warnings(journal, rows(journal)))


def test_a_run_that_comes_back_to_its_first_board(make, board):
    run = make(implementations=("plain", "copy"), replicates=2)
    killed_after(run.execute(), 1)
    board.append("bbbb")
    killed_after(resumed(run, any_board=True).execute(), 3)
    board.append("aaaa")
    journal = read(resumed(run).execute())
    assert [x.board for x in journal.records] == [UNSET, "bbbb", "bbbb", UNSET]
    assert supervisor.ELSEWHERE in journal.records[-1].measurement.remarks


def test_the_board_of_a_run_on_one_is_said_once(make, board):
    run = make(replicates=2)
    killed_after(run.execute(), 1)
    journal = read(resumed(run, any_board=True).execute())
    assert [x.board for x in journal.records] == [UNSET, UNSET]
    assert described(journal)["boards"] == ["aaaa"]
    assert not any("boards" in x for x in warnings(journal, rows(journal)))


def test_an_older_journal_is_told_apart_from_what_any_board_adds(make, board):
    run = make(replicates=3)
    board.append("")
    killed_after(run.execute(), 1)
    board.append("bbbb")
    killed_after(resumed(run).execute(), 2)  # it goes on as it always did
    journal = read(resumed(run, any_board=True).execute())
    assert [x.board for x in journal.records] == [UNSET, UNSET, "bbbb"]
    assert boards(journal.header, journal.records) == {"unknown", "bbbb"}


def test_a_board_that_does_not_say_which_it_is(make, board):
    run = make(replicates=2)
    killed_after(run.execute(), 1)
    board.append("")
    with pytest.raises(NotResumable, match="GPU: it does not say which board it is"):
        resumed(run, any_board=True).execute()


def test_a_finished_run_has_nothing_to_resume_and_starts_no_worker(make):
    run = make()
    (cell,) = run.cells
    done = Record(cell.case, "plain", "many", None, 0, 0, "hot", "error", "verify: no")
    written(run, header_of(run), done)
    again = supervisor.resume("latest", run.home, run.catalog, Silent())
    again.python = lambda environment: Path("/nonexistent")
    assert kinds(again.execute()) == {"header": 1, "record": 1, "footer": 1}


def test_what_another_process_finished_meanwhile_is_not_measured_again(make):
    run = make()
    (cell,) = run.cells
    written(run, header_of(run))
    again = supervisor.resume("latest", run.home, run.catalog, Silent())
    again.python = lambda environment: Path("/nonexistent")
    written(run, Record(cell.case, "plain", "many", None, 0, 0, "hot", "error", "verify: no"))
    assert kinds(again.execute()) == {"header": 1, "record": 1, "footer": 1}


def test_interrupted_before_anything_is_known(make, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 60\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    run = make(python=lambda environment: python)
    with pytest.raises(Interrupted) as error:
        run.execute()
    assert "--resume" not in str(error.value)  # there is nothing yet to go on with
    assert run.home.runs() == []


def test_kill_9_then_resume(program, plan_file, processes):
    plan = plan_file([16, 32, 64, 128], replicates=2)
    arguments = ("run", "--plan", str(plan), "--implementation", "slow", "--implementation", "plain")
    process = program.start(*arguments)
    processes.wait_for(lambda: list(program.home.glob("journals/*.lock")), "the lock")
    process.kill()  # so early that there is nothing to go on with
    process.communicate()
    assert not list(program.home.glob("journals/*.jsonl"))
    process = program.start(*arguments)
    program.records(3)
    workers = processes.children(process.pid)
    process.kill()
    process.communicate()
    processes.wait_for(lambda: not any(map(processes.alive, workers)), "the worker to end with its parent")
    path = program.journal()
    before = identities(path)
    assert len(before) < 16
    with open(path, "ab") as file:
        file.write(b'{"kind":"record","case":{"oper')  # a line that a power cut tore
    code, out, err = program.run("run", "--resume", "latest")
    assert (code, err) == (0, "")
    assert f"{len(before)} done already" in out
    after = identities(path)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == 16
    assert kinds(path) == {"header": 1, "record": 16, "footer": 1}
    assert read(path).footers[0].complete


def test_ctrl_c_then_resume(program, plan_file, processes):
    plan = plan_file([16, 32, 64, 128], replicates=2)
    process = program.start("run", "--plan", str(plan), "--implementation", "slow", "--implementation", "plain")
    program.records(2)
    workers = processes.children(process.pid)
    assert len(workers) == 1
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    path = program.journal()
    run = path.stem
    assert process.returncode == 130
    assert f"kernelmark run --resume {run}" in err
    assert "Traceback" not in err
    assert not any(map(processes.alive, workers))
    assert not read(path).footers[0].complete

    # Something of the surroundings changed: not comparable with what is there.
    truth = path.read_bytes()
    lines = truth.splitlines(keepends=True)
    header = json.loads(lines[0])
    header["conditions"]["threads"] = 999
    path.write_bytes(b"".join([json.dumps(header).encode() + b"\n", *lines[1:]]))
    code, _, err = program.run("run", "--resume", run)
    assert code == 4
    assert "threads: 999 then" in err
    assert "Start a new run" in err
    path.write_bytes(truth)

    # Going on; a second and a third one beside it are refused.
    first = program.start("run", "--resume", run)
    processes.wait_for(path.with_suffix(".lock").exists, "the lock")
    for _ in range(2):
        code, _, err = program.run("run", "--resume", run)
        assert code == 2
        assert "is being measured by another process" in err
    assert first.wait(60) == 0
    first.communicate()
    assert len(identities(path)) == len(set(identities(path))) == 16
    assert kinds(path)["header"] == 1
    assert [x.complete for x in read(path).footers] == [False, True]


def test_full_disk(program, plan_file):
    plan = plan_file(list(range(1, 41)))
    bare = {x: y for x, y in program.environment.items() if not x.startswith("COV")}
    arguments = ("run", "--plan", str(plan), "--implementation", "plain")
    process = program.start(*arguments, environment=bare, limit="ulimit -f 24")  # files of at most 24 KiB
    _, err = process.communicate(timeout=60)
    path = program.journal()
    assert process.returncode == 5
    assert "cannot be written" in err
    assert f"--resume {path.stem}" in err
    assert "Traceback" not in err
    journal = read(path)
    assert not journal.torn
    assert 0 < len(journal.records) < 40
    code, _, err = program.run("run", "--resume", "latest")
    assert (code, err) == (0, "")
    assert len(identities(path)) == len(set(identities(path))) == 40


def test_a_disk_too_full_for_anything(program, plan_file):
    bare = {x: y for x, y in program.environment.items() if not x.startswith("COV")}
    arguments = ("run", "--plan", str(plan_file([16])), "--implementation", "plain")
    process = program.start(*arguments, environment=bare, limit="ulimit -f 1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "cannot be written" in err
    assert "--resume" not in err
    assert not list(program.home.glob("journals/*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_end_a_run_in_order(program, plan_file, processes, number, code):
    plan = plan_file([16, 32, 64, 128], replicates=2)
    process = program.start("run", "--plan", str(plan), "--implementation", "slow")
    program.records(1)
    workers = processes.children(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    path = program.journal()
    assert process.returncode == code
    assert f"kernelmark run --resume {path.stem}" in err
    assert not any(map(processes.alive, workers))
    assert [x.complete for x in read(path).footers] == [False]


@pytest.mark.parametrize("output", ["closed", "full"])
def test_an_output_that_cannot_be_written_stops_no_run(program, plan_file, output):
    arguments = ("run", "--plan", str(plan_file([16, 32])), "--implementation", "fails")
    process = program.start(*arguments, limit="exec >/dev/full" if output == "full" else "true")
    if output == "closed":
        process.stdout.close()
        process.stdout = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    journal = read(program.journal())
    assert len(journal.records) == 2
    assert journal.footers[0].complete


@pytest.mark.parametrize("kills", [2, 3])
def test_a_worker_killed_at_its_start_is_tried_again_twice(make, tmp_path, kills):
    run = make()
    said = [json.dumps({"message": "facts", "conditions": {"threads": 1}})]
    said.append(
        json.dumps(
            {"message": "result", "index": 0, "status": "error", "reason": "x", "measurement": None} | SPENT
        )
    )
    said.append(json.dumps({"message": "done"} | SPENT))
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\n{TOKEN}"
        f"for i in $(seq {kills}); do if mkdir {tmp_path}/$i 2>/dev/null; then kill -9 $$; fi; done\n"
        + "".join(f"echo \"$token\"'{x}' >/dev/fd/$3\n" for x in said)
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    run.python = lambda environment: python
    if kills == 2:
        assert kinds(run.execute()) == {"header": 1, "record": 1, "footer": 1}
    else:
        with pytest.raises(HarnessError, match="could not start: its process was ended by SIGKILL"):
            run.execute()


FORGER = '''
import json
import os

REQUIRES = ("torch",)
MEASURED = {"samples": {"latency": [1e-6] * 20}, "timer": "monotonic"}


def send(text):
    for name in os.listdir("/proc/self/fd"):
        try:
            if "pipe" in os.readlink(f"/proc/self/fd/{name}") and int(name) > 2:
                os.write(int(name), text)
        except OSError:
            pass


def forges(x):
    said = {"message": "result", "index": 0, "status": "ok", "reason": None, "measurement": MEASURED}
    said["spent_s"] = {}
    send(json.dumps(said).encode() + b"\\n")
    return x * 2


def babbles(x):
    send(b"\\xff\\xfe{[nonsense\\n")
    return x * 2


def asks(x):
    """Finds the harness's own way to send, and has it send a result that nobody measured."""
    import sys

    frame = sys._getframe()
    while "send" not in frame.f_locals:
        frame = frame.f_back
    from kernelmark.registry.store.record import Measurement
    from kernelmark.suite.run.messages import Result

    frame.f_locals["send"](Result(0, "ok", None, Measurement({"latency": (1e-6,) * 20}, "monotonic"), {}))
    return x * 2


IMPLEMENTATIONS = {"double": {x.__name__: (lambda case, x=x: x) for x in (forges, babbles, asks)}}
'''


def test_a_kernel_that_writes_to_the_pipe_forges_nothing(make, root):
    (root / "baselines" / "forger.py").write_text(FORGER)
    journal = read(make(implementations=("forges", "babbles", "asks", "plain")).execute())
    found = {x.implementation: x for x in journal.records}
    assert found["plain"].status == "ok"
    for name in ("forges", "babbles", "asks"):
        assert found[name].status == "incorrect"
        assert "something other than the harness wrote to its pipe" in found[name].reason
    assert journal.footers[0].complete


ONCE = """
had = []


def first_only(case):
    if had:
        raise RuntimeError("this process had one")
    had.append(case)
    return lambda x: x * 2


REQUIRES = ("torch",)
ONCE = ("engine",)
IMPLEMENTATIONS = {"double": {"engine": first_only}}
"""


def test_what_a_process_has_once_only_gets_one_for_each_case(make, root):
    (root / "baselines" / "engines.py").write_text(ONCE)
    names = ("engine", "plain")
    path = make(N=(16, 32, 64), implementations=names, replicates=2).execute()
    journal = read(path)
    assert {(x.implementation, x.status) for x in journal.records} == {("engine", "ok"), ("plain", "ok")}
    assert len(journal.records) == 2 * 3 * 2


FULL = """
from kernelmark.registry.store.metric import Metric
from kernelmark.registry.store.record import Measurement
from kernelmark.suite.workload import Workload

cases = set()


def measure(case, system, session, prepared):
    session.device.held = lambda: 2**31  # what programs left behind
    cases.add(case.name)
    return Measurement({"step": (1.0,), "cases": (float(len(cases)),)}, "monotonic")


WORKLOAD = Workload(
    name="fills",
    summary="leaves memory behind",
    axes={"N": "anything"},
    dtypes=("fp32",),
    bytes=lambda case: 0,
    flops=lambda case: 0,
    measured=(Metric("step", "ms"), Metric("cases", "1")),
    measure=measure,
    plans={},
)
"""


def test_a_case_of_programs_that_leaves_memory_behind_ends_its_process(make, root):
    """Both systems of a case in one, the next case in another, and nothing is lost."""
    for folder, name, text in (
        ("workloads", "fills", FULL),
        (
            "baselines",
            "leavers",
            'IMPLEMENTATIONS = {"fills": {"one": lambda case: None, "two": lambda case: None}}\n',
        ),
    ):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / f"{name}.py").write_text(text)
    fills = ('operator = "double"', 'operator = "fills"\npass = "program"'), ('cache = "hot"\n', "")
    journal = read(make(N=(16, 32, 64), implementations=("one", "two"), told=fills).execute())
    assert len(journal.records) == 6
    seen = {x.measurement.samples["cases"] for x in journal.records if x.measurement is not None}
    assert ({x.status for x in journal.records}, seen) == ({"ok"}, {(1.0,)})


def test_a_program_without_what_its_case_is_judged_by_costs_its_row_alone(make, root):
    less = FULL.replace('{"step": (1.0,), ', '({"step": (1.0,)} if system else {}) | {')
    for folder, name, text in (
        ("workloads", "fills", less),
        ("baselines", "leavers", 'IMPLEMENTATIONS = {"fills": {"one": lambda case: 0, "two": lambda case: 1}}\n'),
    ):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / f"{name}.py").write_text(text)
    fills = ('operator = "double"', 'operator = "fills"\npass = "program"'), ('cache = "hot"\n', "")
    journal = read(make(implementations=("one", "two"), told=fills).execute())
    found = {x.implementation: (x.status, x.reason) for x in journal.records}
    assert found == {"one": ("error", "no samples of 'step', which the case is judged by"), "two": ("ok", None)}


CROWDED = FULL.replace(
    "    cases.add(case.name)\n",
    '    cases.add(system)\n    if len(cases) > 1:\n        raise MemoryError("no room beside what is left")\n',
)


def test_a_program_without_room_beside_what_was_left_is_tried_in_a_process_of_its_own(make, root):
    systems = ", ".join(f'"{x}": lambda case: "{x}"' for x in ("one", "two", "three"))
    for folder, name, text in (
        ("workloads", "fills", CROWDED),
        ("baselines", "leavers", f'IMPLEMENTATIONS = {{"fills": {{{systems}}}}}\n'),
    ):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / f"{name}.py").write_text(text)
    fills = ('operator = "double"', 'operator = "fills"\npass = "program"'), ('cache = "hot"\n', "")
    journal = read(make(N=(16, 32), implementations=("one", "two", "three"), told=fills).execute())
    assert [(x.status, x.measurement.samples["cases"]) for x in journal.records] == [("ok", (1.0,))] * 6


def test_a_process_measures_up_to_the_second_of_what_it_has_once():
    def cell(name, once):
        return SimpleNamespace(implementation=SimpleNamespace(name=name, once=once, apart=False))

    plain, engine, other = cell("plain", False), cell("engine", True), cell("other", True)
    cells = {3: plain, 4: engine, 5: plain, 7: other, 8: engine, 9: plain}
    assert [i for i, _ in supervisor.one_process(cells)] == [3, 4, 5, 7]
    assert [i for i, _ in supervisor.one_process({8: engine, 9: plain})] == [8, 9]
    assert [i for i, _ in supervisor.one_process({})] == []


def test_what_is_apart_has_a_process_of_its_own():
    def cell(apart, once=False):
        return SimpleNamespace(implementation=SimpleNamespace(name="x", once=once, apart=apart))

    cells = {1: cell(False), 2: cell(True), 3: cell(False), 4: cell(True)}
    assert [i for i, _ in supervisor.one_process(cells)] == [1, 3]
    assert [i for i, _ in supervisor.one_process({2: cells[2], 3: cells[3], 4: cells[4]})] == [2, 4]


LITTERS = """
import colorsys


def litters(case):
    colorsys.left = True
    return lambda x: x * 2


IMPLEMENTATIONS = {"double": {"litters": litters}}
"""
READS = """
import colorsys


def reads(case):
    return lambda x: x * (2 + hasattr(colorsys, "left"))


IMPLEMENTATIONS = {"double": {"reads": reads}}
"""


@pytest.mark.parametrize("apart", ["", "APART = ('double',)"])
def test_what_others_leave_in_a_process_is_not_there_for_what_is_apart(make, root, apart):
    (root / "baselines" / "litters.py").write_text(LITTERS)
    (root / "baselines" / "reads.py").write_text(READS + apart)
    journal = read(make(implementations=("litters", "reads"), N=(16, 32)).execute())
    statuses = Counter(x.status for x in journal.records if x.implementation == "reads")
    # Of two cases at least one comes after what leaves something.
    assert (statuses["incorrect"] > 0) == (not apart), statuses
    assert {x.status for x in journal.records if x.implementation == "litters"} == {"ok"}


def test_a_time_that_no_device_can_reach_is_refused(make, monkeypatch):
    monkeypatch.setattr(supervisor, "least_ms", lambda *given: 1e6)
    (record,) = read(make().execute()).records
    assert record.status == "incorrect"
    assert record.reason.startswith("faster than the device: ")


def test_a_time_below_zero_is_no_time():
    reason = supervisor._below_zero(Measurement({"latency": (-0.002, -0.001, 0.001)}, "graph"))
    assert reason is not None
    assert reason.startswith("not measurable by timer graph: flushes alone took 0.001 ms a call longer than")
    assert supervisor._below_zero(Measurement({"latency": (0.001,)}, "graph")) is None


@pytest.mark.parametrize("ends", [True, False])
def test_a_budget_ends_a_run_in_order_and_later_replicates_do_with_less(make, monkeypatch, ends):
    """Nothing is measured: records are what a worker would have said, and the clock is a list."""
    run = make([16, 32, 1 << 20], replicates=3, until=1000.0)
    measured = []

    def replicate(number, cells):
        measured.append([x.case.axes["N"] for x in cells])
        if number == 0:
            run._header({}, None)
        for i, cell in enumerate(cells):
            seen = Measurement({"latency": (1.0,)}, "wall")
            run._write_record(cell.record(number, i, "ok", None, seen, {"sample": 10.0}))
        if number == 2 and ends:
            raise OutOfTime

    monkeypatch.setattr(run, "replicate", replicate)
    # 48 s for each of the two replicates to come: a start and four times 10 s; then 28 s: a start and two.
    clock = SimpleNamespace(monotonic=iter([0.0, 904.0, 972.0, 999.0]).__next__)
    monkeypatch.setattr(supervisor, "time", clock)
    path = run.execute()
    assert measured == [[16, 32, 1 << 20], [16, 32, 1 << 20], [16, 1 << 20]]
    assert [x.case.axes["N"] for x in run.left_out] == [32]
    assert run.ran_out == ends
    assert not read(path).footers[0].complete  # a row without all its replicates is not whole


def test_what_a_replicate_has_no_time_for_is_left_out_for_good(make, monkeypatch):
    run = make([16, 32, 1 << 20], replicates=3, until=1000.0)
    kept = iter([(0, 1), (0, 2)])
    monkeypatch.setattr(supervisor.budget, "fit", lambda cells, *given: tuple(cells[i] for i in next(kept)))
    run._writer = Writer(run.path)
    run._writer.write(header_of(run))
    run._note(run.cells[1].record(0, 0, "crashed", "it was"))  # and is not tried again, with or without time
    for replicate in (1, 2):
        run._affordable(replicate)
    run._writer.close()
    assert [x.case.axes["N"] for x in run.left_out] == [1 << 20]


def test_the_world_told_of_is_the_largest_that_can_run_here(make, monkeypatch):
    run = make(worlds=(2, 4, 8), gpus=(0, 1, 2, 3))
    assert run._world == 8  # a CPU's ranks are processes
    run.device = "cuda"
    assert run._world == 4
    run.gpus = ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert run._world == 1


def test_a_shard_in_which_nothing_can_run_is_whole(make, tmp_path):
    """Another shard of its run may hold what can; alone it is a mistake of whoever asked."""
    absent = {"implementations": ("absent",), "replicates": 2}
    with pytest.raises(InputError, match="nothing of this plan can run here"):
        make(**absent).execute()
    python = tmp_path / "python"
    said = ({"message": "facts", "conditions": {"threads": 1}}, {"message": "done"} | SPENT)
    lines = "".join(f"echo \"$token\"'{json.dumps(x)}' >/dev/fd/$3\n" for x in said)
    python.write_text(f"#!/bin/sh\n{TOKEN}sleep 0.1\n{lines}")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    path = make(**absent, request=Request(shard=(2, 3)), python=lambda environment: python).execute()
    journal = read(path)
    assert [x.status for x in journal.records] == ["unavailable"]
    assert journal.header.request.shard == (2, 3)
    assert journal.header.conditions["threads"] == 1
    assert journal.footers[0].complete


def test_a_shard_measures_the_seeds_that_it_has_and_is_whole(make):
    run = make(N=(16, 32), replicates=3)
    first, second = run.plan.cases
    run.plan = replace(run.plan, seeds={first.full_name: (0, 2)})
    path = run.execute()
    assert sorted((x[0], x[3]) for x in identities(path)) == sorted(
        [(first.name, 0), (first.name, 2), *((second.name, i) for i in range(3))]
    )
    assert read(path).footers[0].complete
    again = resumed(run)
    assert again.plan.seeds == {first.full_name: (0, 2)}
    again.execute()
    assert len(identities(path)) == 5


def test_a_shards_time_is_shared_among_the_replicates_that_it_has(make, monkeypatch):
    run = make([16, 32], replicates=5, until=1000.0)
    run.plan = replace(run.plan, seeds={x.full_name: (0, 3) for x in run.plan.cases})
    given = []
    monkeypatch.setattr(
        supervisor.budget, "fit", lambda cells, replicates, left_s, *rest: given.append(left_s) or cells
    )
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: 900.0))
    run._writer = Writer(run.path)
    run._writer.write(header_of(run))
    for replicate in (3, 4):
        assert run._affordable(replicate) == run.cells
    run._writer.close()
    assert given == [100.0]  # and none is to come after it


def test_a_budget_that_ends_before_anything_is_measured(make, monkeypatch):
    run = make(until=0.0)

    def replicate(number, cells):
        raise OutOfTime

    monkeypatch.setattr(run, "replicate", replicate)
    with pytest.raises(supervisor.OutOfBudget, match="ended before anything was measured") as error:
        run.execute()
    assert error.value.exit_code == 3
    assert not run.path.exists()

    def started(number, cells):  # the worker's first words came, and no row
        run._header({}, None)
        raise OutOfTime

    monkeypatch.setattr(run, "replicate", started)
    with pytest.raises(supervisor.OutOfBudget, match="anything was measured; go on with: kernelmark run --resume"):
        run.execute()
    assert not read(run.path).footers[0].complete
