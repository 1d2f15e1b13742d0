"""What is said of ranks that do not come back, and the variables without which none is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import pytest
from kernelmark.suite.measure import ranks
from kernelmark.suite.measure.ranks import NO_MULTICAST, _own_stack, _place, require_no_multicast

STACK = """Current thread 0x00007f (most recent call first):
  File "/home/someone/kernels/ring.py", line 12 in step
  File "/venv/lib/torch/distributed/x.py", line 3 in all_reduce
"""


def test_a_stack_tells_a_place_without_its_folder():
    assert _place(STACK) == "ring.py:12 step"
    assert _place("\n".join(STACK.splitlines()[2:])) is None  # it waits for others
    assert _place("") == "code that does not answer"
    assert _place(_own_stack()) == "ranks.py:" + _place(_own_stack()).partition(":")[2]


@pytest.mark.parametrize("name", NO_MULTICAST)
@pytest.mark.parametrize("value", [None, "", "yes"])
def test_no_ranks_without_the_variables(name, value):
    require_no_multicast(NO_MULTICAST)
    wrong = {**NO_MULTICAST, name: value}
    if value is None:
        del wrong[name]
    with pytest.raises(RuntimeError, match=f"no case on several GPUs without {name}=.*out of service"):
        require_no_multicast(wrong)


@pytest.fixture
def two():
    """Two ranks without torch, the second of which ends when it is told to, or, `deaf`, never."""
    processes = []

    def made(deaf: bool) -> ranks.Ranks:
        own, theirs = socket.socketpair()
        program = "import socket, sys, time; socket.socket(fileno=int(sys.argv[1])).recv(1); time.sleep(0)"
        program = program.replace("sleep(0)", "sleep(600)") if deaf else program
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        processes.append(process)
        theirs.close()
        follower = ranks._Follower(1, process, Connection(own.detach()), os.open(os.devnull, os.O_RDONLY))
        found = ranks.Ranks.__new__(ranks.Ranks)
        found.__dict__.update(world=2, _followers=[follower], _closing=False)
        found._thread = threading.Thread(target=lambda: None)
        found._thread.start()
        return found

    yield made
    assert [x.poll() is not None for x in processes] == [True]


def test_ranks_that_are_told_end_in_order(two):
    closed = two(deaf=False)
    closed.close()
    assert closed._followers[0].process.returncode == 0


def test_a_rank_that_does_not_end_when_told_is_killed(two, monkeypatch):
    monkeypatch.setattr(ranks, "END_S", 0.2)
    closed = two(deaf=True)
    closed.close()
    assert closed._followers[0].process.returncode == -9


def test_ranks_that_do_not_meet_are_lost(monkeypatch):
    """The second never takes its place in the group, as one whose GPU does not answer."""
    monkeypatch.setattr(ranks, "START_S", 0.3)
    monkeypatch.setattr(ranks, "LOOK_S", 0.1)
    monkeypatch.setattr(ranks, "require_no_multicast", lambda environment: None)
    lost: list[Exception] = []
    gone = threading.Event()

    def join(*arguments):
        gone.wait(10)
        raise RuntimeError("it would wait for ever")

    def note(error):
        lost.append(error)
        gone.set()

    monkeypatch.setattr(ranks, "join", join)
    command = [sys.executable, "-c", "import signal, time; signal.signal(10, signal.SIG_IGN); time.sleep(600)"]
    with pytest.raises(RuntimeError, match="for ever"):
        ranks.Ranks(2, None, command, b"", note)
    assert str(lost[0]).startswith("not finished within 0.3 s: ")
    assert isinstance(lost[0], ranks.Lost)
    assert lost[0].late
