"""An image as the environment of one side of an A/B: its workers in a container, the other side's beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kernelmark.registry.home import Home
from kernelmark.suite.container.build import Built
from kernelmark.suite.container.engine import Engine
from kernelmark.suite.container.interpreter import opened
from kernelmark.suite.container.session import Session

pytestmark = pytest.mark.image

HOUSE = Path(__file__).resolve().parents[3]


def test_one_side_in_an_image(machine, image, small_plan, tmp_path):
    """Killed as soon as both sides have rows: what they say is there, and nothing is left in the engine."""
    there = machine.with_home(tmp_path)
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("regression_detector")), "--baseline", "HEAD", "--mode", "ab"),
            *("--base-environment", f"image:{image.id}", "--plan", small_plan, "--device", "cpu"),
            *("--implementation", "torch"),
        ],
        env={**there.environment, "TMPDIR": str(tmp_path)},
        cwd=HOUSE,
        stderr=subprocess.PIPE,
        text=True,
    )
    before = {x.id for x in _running(machine, image)}
    try:
        _until(lambda: len(_measured(tmp_path)) == 2 or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        (container,) = (x for x in _running(machine, image) if x.id not in before)
        host = container.attrs["HostConfig"]
        assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
        assert not any(x["RW"] for x in container.attrs["Mounts"] if x["Type"] == "bind")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    digests = {x.header.conditions["image_digest"] for x in _measured(tmp_path)}
    assert digests == {image.id, None}
    assert len({x.header.seed for x in _measured(tmp_path)}) == 1
    _until(lambda: not any(x.id == container.id for x in _running(machine, image)))


def test_a_worker_in_it_ends_with_the_one_here(machine, image, tmp_path):
    engine = Engine(machine.client, machine.environment["DOCKER_HOST"])
    session = Session(engine, Built.of(image), (), Home(tmp_path))
    before = {x.id for x in _running(machine, image)}
    with opened(session, [tmp_path]) as python:
        (container,) = (x for x in _running(machine, image) if x.id not in before)
        reader, writer = os.pipe()
        code = "import os, sys, time; os.write(int(sys.argv[1]), b'here'); time.sleep(600)"
        worker = subprocess.Popen(
            [python, "-c", code, str(writer)], stdin=subprocess.PIPE, pass_fds=(writer,), start_new_session=True
        )
        worker.stdin.close()
        assert os.read(reader, 10) == b"here"
        assert _processes(container) > 0
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        _until(lambda: _processes(container) == 0)
        os.close(reader)
        os.close(writer)
    assert not any(x.id == container.id for x in _running(machine, image))


def _processes(container) -> int:
    """That sleep there."""
    return sum("time.sleep(600)" in " ".join(x) for x in container.top()["Processes"])


def _running(machine, image) -> list:
    return [x for x in machine.client.containers.list() if x.image.id == image.id]


def _measured(home: Path) -> list:
    """The runs that have rows."""
    found = (Home(home).load(x) for x in Home(home).runs())
    return [x for x in found if x.records]


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)
