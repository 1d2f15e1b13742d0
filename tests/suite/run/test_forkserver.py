"""Workers forked from a process that has torch loaded."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.run import forkserver, process
from kernelmark.suite.run.forkserver import ForkServer, ForkServers
from kernelmark.suite.run.messages import Done, Facts, Stage, Task
from kernelmark.suite.run.process import Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are adopted on Linux only")
TASK = Task("cpu", 1, 0, (), Sampling(), token="secret", ceilings=False)


@pytest.fixture(scope="module")
def servers():
    with ForkServers() as all_:
        yield all_


@pytest.fixture
def server(servers):
    found = servers.of(Path(sys.executable))
    assert found is not None
    return found


def worker(tmp_path, server) -> Worker:
    return Worker(TASK, Path("/nowhere/python"), tmp_path / "log", server=server)


def test_a_forked_worker_says_what_a_started_one_does(tmp_path, server):
    for _ in range(2):
        with worker(tmp_path, server) as forked:
            forked.allow(60)
            said = list(forked.messages())
            assert said[0] == Stage("start")
            assert isinstance(said[1], Facts)
            assert isinstance(said[-1], Done)
            assert forked.fate() == ("crashed", "its process ended with exit code 0")  # asked of one that was done


def test_it_is_our_child_in_a_session_of_its_own_and_can_be_ended(tmp_path, server, processes):
    with worker(tmp_path, server) as forked:
        pid = forked._process.pid
        assert forked.forked
        assert os.getsid(pid) == os.getpgid(pid) == pid
        assert Path(f"/proc/{pid}/status").read_text().split("PPid:\t")[1].split()[0] == str(os.getpid())
        os.kill(pid, signal.SIGKILL)
        forked.allow(60)
        list(forked.messages())
        assert forked.fate() == ("crashed", "its process was ended by SIGKILL")
        assert forked.killed
    assert not processes.alive(pid)


def test_one_that_we_know_can_be_ended_at_once(tmp_path, server, processes):
    """Its session is its own before its number is known: else nothing ended one that stopped in between."""
    for _ in range(20):
        with worker(tmp_path, server) as forked:
            pid = forked._process.pid
            os.killpg(pid, signal.SIGSTOP)
            forked._process.terminate = lambda: None  # a stopped one would not hear it
            os.killpg(pid, signal.SIGKILL)
        assert not processes.alive(pid)


def test_late_ones_are_ended(tmp_path, server, processes, monkeypatch):
    monkeypatch.setattr(process, "END_S", 0.1)  # a stopped one does not hear that it is asked to end
    with worker(tmp_path, server) as forked:
        os.kill(forked._process.pid, signal.SIGSTOP)
        forked.allow(0.2)
        list(forked.messages())
        assert forked.fate() == ("timeout", "not finished within 0.2 s")
    assert not processes.alive(forked._process.pid)


def test_torch_is_loaded_already(tmp_path, server):
    """A forked worker has done its task in less than loading torch takes, each at its best."""

    def seconds(use: ForkServer | None) -> float:
        begin = time.monotonic()
        with Worker(TASK, Path(sys.executable), tmp_path / "log", server=use) as one:
            one.allow(60)
            assert isinstance(list(one.messages())[-1], Done)
        return time.monotonic() - begin

    assert min(seconds(server) for _ in range(3)) < 0.5 * seconds(None)


def test_the_compilers_instructions_are_tried_while_it_is_loaded(monkeypatch):
    """Those that this processor has; a compiler that is missing is whoever's who compiles."""
    tried = []

    class Instructions(str):
        def __bool__(self) -> bool:
            tried.append(str(self))
            return True

    def fail() -> None:
        raise RuntimeError("no C++ compiler")

    fake = ModuleType("torch._inductor.cpu_vec_isa")
    fake.supported_vec_isa_list = [Instructions(x) for x in ("avx512f avx512vl", "avx2", "amx_tile")]
    fake.x86_isa_checker = lambda: ["avx2", "avx512f", "avx512vl"]
    fake.valid_vec_isa_list = fail
    for name in (
        "torch",
        "torch._inductor",
        "torch._inductor.compile_fx",
        "torch.utils",
        "torch.utils.cpp_extension",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(forkserver.platform, "machine", lambda: "x86_64")
    threads = threading.active_count()
    forkserver._load_compiler()
    assert sorted(tried) == ["avx2", "avx512f avx512vl"]
    assert threading.active_count() == threads


def test_an_interpreter_that_cannot_be_a_server_has_none(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with ForkServers() as all_:
        assert all_.of(python) is None
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(forkserver, "START_S", 0.2)
    monkeypatch.setattr(forkserver, "END_S", 0.2)
    with ForkServers() as all_:
        assert all_.of(python) is None


def test_servers_end_with_their_supervisor(tmp_path, processes):
    program = (
        "import sys, time; from pathlib import Path; from kernelmark.suite.run.forkserver import ForkServers\n"
        "all_ = ForkServers(); print(all_.of(Path(sys.executable))._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        pid = int(supervisor.stdout.readline())
        assert processes.alive(pid)
        supervisor.kill()
    processes.wait_for(lambda: not processes.alive(pid), "the server's end")


@pytest.fixture
def silent(monkeypatch):
    """A server that does not answer in time, and its end of the channel."""
    monkeypatch.setattr(forkserver, "ANSWER_S", 0.05)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"])
    server = ForkServer(process, ours)
    with theirs:
        yield server, theirs
    server.close()


def test_an_answer_that_comes_late_is_nobodys(silent):
    server, theirs = silent
    all_ = ForkServers()
    all_._servers[Path("python")] = server
    assert all_.of(Path("python")) is server
    assert server.fork(0, 1, 2) is None
    with contextlib.suppress(BrokenPipeError):
        theirs.sendall(b"123")
    assert server.fork(0, 1, 2) is None
    assert all_.of(Path("python")) is None


def test_a_fork_that_comes_late_reads_no_task(tmp_path, silent):
    server, theirs = silent
    with Worker(TASK, Path("/bin/cat"), tmp_path / "log", server=server):
        _, descriptors, _, _ = socket.recv_fds(theirs, 16, 3)
        os.set_blocking(descriptors[0], False)
        assert os.read(descriptors[0], 1 << 16) == b""  # its end, and nothing before it
        for descriptor in descriptors:
            os.close(descriptor)


def test_a_worker_that_nobody_adopts_ends():
    program = (
        "import os; from kernelmark.suite.run import forkserver; forkserver.ADOPTED_S = 0.1\n"
        "forkserver._become_worker([os.dup(0), os.dup(1), os.dup(2)], -1)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, timeout=20, check=False)
    assert done.returncode == 1


def test_a_server_that_is_gone_costs_nothing_but_time(tmp_path, server):
    """The next worker is started as ever. The last test: the server is theirs all."""
    server._process.kill()
    server._process.wait()
    with Worker(TASK, Path(sys.executable), tmp_path / "log", server=server) as one:
        assert isinstance(one._process, subprocess.Popen)
        assert not one.forked
        one.allow(60)
        assert isinstance(list(one.messages())[-1], Done)
