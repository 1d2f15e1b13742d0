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
from kernelmark.suite.measure.ranks import NO_MULTICAST, _fate, _own_stack, _place, require_no_multicast

STACK = """Current thread 0x00007f (most recent call first):
  File "/home/someone/kernels/ring.py", line 12 in step
  File "/venv/lib/torch/distributed/x.py", line 3 in all_reduce
"""


def test_a_stack_tells_a_place_without_its_folder():
    assert _place(STACK) == "ring.py:12 step"
    assert _place("\n".join(STACK.splitlines()[2:])) is None  # it waits for others
    assert _place("") == "code that does not answer"
    assert _place(_own_stack()) == "ranks.py:" + _place(_own_stack()).partition(":")[2]


def test_how_a_process_ended():
    assert _fate(-9) == "its process was ended by SIGKILL"
    assert _fate(3) == "its process ended with exit code 3"


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
def closing(monkeypatch):
    """Two ranks without torch: the second ends when it is told to. Gives what closes them, and what was lost."""

    def close(leave) -> list[str]:
        own, theirs = socket.socketpair()
        program = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        follower = ranks._Follower(1, process, Connection(own.detach()), os.open(os.devnull, os.O_RDONLY))
        lost: list[str] = []
        two = ranks.Ranks.__new__(ranks.Ranks)
        two.__dict__.update(
            world=2, _lost=lambda error: lost.append(str(error)), _followers=[follower], _threads=1, _closing=False
        )
        two._thread = threading.Thread(target=lambda: None)
        two._thread.start()
        monkeypatch.setattr(ranks, "leave", lambda: leave(process))
        monkeypatch.setattr(ranks, "_share_threads", lambda threads, world: None)
        two.close()
        assert process.poll() is not None
        return lost

    return close


def test_ranks_give_up_their_groups_at_once(closing):
    """As NCCL asks for it: rank 0 is not done before the other one is."""
    left: list[int] = []
    assert closing(lambda process: left.append(process.wait())) == []
    assert left == [0]


def test_who_cannot_let_go_of_its_groups_is_lost(closing, monkeypatch):
    monkeypatch.setattr(ranks, "END_S", 0.5)
    stuck = threading.Event()
    assert closing(lambda process: stuck.wait()) == ["rank 0 of 2 could not give up its groups"]
    stuck.set()
