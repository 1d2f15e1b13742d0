"""What runs a worker inside a container, here as a process of this machine: it knows nothing of containers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os, signal, sys
task = sys.stdin.buffer.read()
print("printed")
os.write(int(sys.argv[1]), b"heard " + task)
"""


@pytest.fixture
def inside(tmp_path: Path):
    started = []

    def start(end: str) -> subprocess.Popen[bytes]:
        script = tmp_path / "worker.py"
        script.write_text(WORKER + end)
        process = subprocess.Popen(
            [sys.executable, "-m", "kernelmark.suite.container.inside", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdin is not None
        process.stdin.write(b'{"a": 1}\n')
        process.stdin.flush()  # and stays open, as whoever sent it is still there
        return process

    yield start
    for process in started:
        with process:
            process.kill()


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV)],
)
def test_it_ends_as_the_worker_does(inside, end: str, code: int) -> None:
    process = inside(end)
    assert process.wait(60) == code
    assert process.stdout.read() == b'heard {"a": 1}\n'  # messages only
    if code <= 3:
        assert process.stderr.read() == b"printed\n"


def test_a_worker_ends_with_the_connection(inside, processes, tmp_path: Path) -> None:
    """And so do helpers of it."""
    ids = tmp_path / "ids"
    process = inside(
        "import subprocess, time\n"
        'helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])\n'
        f"open({str(ids)!r}, 'w').write(f'{{os.getpid()}} {{helper.pid}}\\n')\n"
        "time.sleep(600)\n"
    )
    processes.wait_for(lambda: ids.exists() and ids.read_text().endswith("\n"), "the worker")
    running = [int(x) for x in ids.read_text().split()]
    assert all(map(processes.alive, running))
    process.stdin.close()
    assert process.wait(60) == 128 + signal.SIGKILL
    processes.wait_for(lambda: not any(map(processes.alive, running)), "its end")
