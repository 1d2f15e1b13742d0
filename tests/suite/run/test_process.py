"""A worker's process under scripts that stand for it: what it leaves behind, what it prints."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.run import process as module
from kernelmark.suite.run.messages import Stage, Task
from kernelmark.suite.run.process import Garbled, Worker

TASK = Task("cpu", 1, 0, (), Sampling(), token="secret")


@pytest.fixture
def worker(tmp_path):
    """A worker whose Python is a script of the shell; fd 3's number is in $3."""

    def start(script: str) -> Worker:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/bash\ncat > /dev/null\n{script}\n")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return Worker(TASK, python, tmp_path / "log")

    return start


def heard(worker: Worker) -> list[object]:
    worker.allow(60)
    return list(worker.messages())


def test_only_lines_with_the_token_are_messages(worker):
    with worker("""echo 'secret{"message":"stage","name":"start"}' >/dev/fd/$3""") as one:
        assert heard(one) == [Stage("start")]
    for line in (
        '{"message":"stage","name":"start"}',
        "secret{",
        'secret{"message":"x"}',
        "secret" + "[" * 100_000,
    ):
        with worker(f"echo '{line}' >/dev/fd/$3; sleep 60") as one, pytest.raises(Garbled):
            heard(one)


def test_a_line_without_end(worker, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_MESSAGE", 1 << 20)
    with worker("yes | tr -d '\\n' >/dev/fd/$3") as one, pytest.raises(Garbled, match="without end"):
        heard(one)


def test_what_it_prints_is_kept_up_to_a_bound(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PRINTED", 1 << 16)
    with worker("yes | head -c 20000000; echo the end; exit 3") as one:
        assert heard(one) == []
        assert one.fate() == ("crashed", "its process ended with exit code 3")
        assert one.last_words() == "It said: y | y | the end"
    assert (tmp_path / "log").stat().st_size < (1 << 16) + 100
    assert (tmp_path / "log").read_text().endswith("\n[more was printed than is kept]\n")


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$", "sleep 60"])
def test_a_child_in_a_session_of_its_own_ends_with_it(worker, tmp_path, processes, end):
    # In the background, in a new session, its parent gone: nothing of the worker's process group.
    with worker(f"setsid bash -c 'echo $$ > {tmp_path}/child; exec sleep 600' & {end}"):
        processes.wait_for((tmp_path / "child").exists, "the child")
        processes.wait_for(lambda: (tmp_path / "child").read_text().strip(), "its id")
        child = int((tmp_path / "child").read_text())
        assert processes.alive(child)
    assert not processes.alive(child)


def test_a_child_of_somebody_else_is_left_alone(worker):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        with worker("exit 0") as one:
            heard(one)
        assert other.poll() is None
        os.kill(other.pid, 9)


def test_neither_what_another_thread_starts_for_a_moment_nor_its_worker(worker):
    """Begun after this worker was: by what it was before it, nothing is known of them."""
    with worker("exit 0") as one:
        heard(one)
        moment = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        beside = worker("sleep 600").__enter__()
    assert moment.poll() is None
    assert beside._process.poll() is None
    moment.kill()
    moment.wait()
    beside.__exit__()
