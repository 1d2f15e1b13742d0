"""Small roots of trivial operators, and the real command line in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernelmark.registry.store.metric import Metric
from kernelmark.registry.store.record import Record
from kernelmark.suite.measure.telemetry import Nvml

from ..processes import alive, children, wait_for
from ..repositories import OPERATOR, Repository, sleeping

BASELINE = '''
import os
import signal
import time
from pathlib import Path

REQUIRES = ("torch",)


def of(call):
    return lambda case: call


def helper():
    """A process that outlives its parent and holds all its pipes open; its id goes to a file."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    with open(Path(__file__).with_name("helpers"), "a") as file:
        file.write(f"{child}\\n")


def killed(x):
    helper()
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(x):
    helper()
    while True:
        time.sleep(1)


def leaves(x):
    os._exit(3)


def hoards(x):
    import torch

    return torch.empty(1 << 48, dtype=torch.uint8)


def fails(x):
    raise ValueError("no such luck\\nand more")


def unable(case):
    raise NotImplementedError("only on Sundays")


def slow(x):
    time.sleep(0.04)
    return x * 2


IMPLEMENTATIONS = {
    "double": {
        "plain": of(lambda x: x * 2),
        "wrong": of(lambda x: x * 2.1),
        "slow": of(slow),
        "killed": of(killed),
        "hangs": of(hangs),
        "leaves": of(leaves),
        "hoards": of(hoards),
        "fails": of(fails),
        "unable": unable,
    },
    "another operator, not here": {"ignored": of(None)},
}
'''

ABSENT = """
REQUIRES = ("no-such-distribution",)
IMPLEMENTATIONS = {"double": {"absent": lambda case: None}}
"""

PLAN = """
replicates = {replicates}
cache = "hot"
deadline_s = {deadline_s}

[sampling]
min_samples = 6
max_samples = 6
min_seconds = 0
max_seconds = 5
warmup_s = 0

[[cases]]
operator = "double"
axes = {{ N = {N} }}
dtype = "fp32"
"""

# The device's ceilings take seconds in every process and are not what these tests look at; neither are the
# table, the report and the registry.
PROGRAM = """
import functools
from kernelmark.suite import cli
from kernelmark.suite.run import supervisor
from kernelmark.suite.cli import run
supervisor.Run = functools.partial(supervisor.Run, ceilings=False)
run.present = lambda *arguments, **named: None
cli.main()
"""


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the developer's results, roots, registry or container."""
    for name in list(os.environ):
        if name.startswith("KERNELMARK_") or name == "MLFLOW_TRACKING_URI":
            monkeypatch.delenv(name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with the operator `double` and implementations of it that end in every way there is."""
    folder = tmp_path / "root"
    for name, text in (
        ("operators/double.py", OPERATOR),
        ("baselines/many.py", BASELINE),
        ("baselines/absent.py", ABSENT),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


WritePlan = Callable[..., Path]


@pytest.fixture
def plan_file(tmp_path: Path) -> WritePlan:
    """Writes a plan of `double` at the given sizes."""

    def write(N: list[int], replicates: int = 1, deadline_s: float = 60) -> Path:
        path = tmp_path / "tiny.toml"
        path.write_text(PLAN.format(N=N, replicates=replicates, deadline_s=deadline_s))
        return path

    return write


class Program:
    """`kernelmark` as a process, on a root and a home of its own."""

    def __init__(self, root: Path, home: Path) -> None:
        self.home = home
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            "KERNELMARK_PATH": str(root),
            "KERNELMARK_HOME": str(home),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, limit: str = "true"
    ) -> subprocess.Popen[str]:
        """Starts it, after a command of the shell that limits what it may."""
        return subprocess.Popen(
            ["bash", "-c", f'{limit}; exec "$@"', "-", sys.executable, "-c", PROGRAM, *arguments],
            env=self.environment if environment is None else dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home.parent,
            start_new_session=True,
            # What runs the tests in the background may have it ignored (nohup), and children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Runs it to its end: exit code, output, error output."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def journal(self) -> Path:
        """The only journal of the home, as soon as it is there."""
        return wait_for(lambda: next((self.home / "journals").glob("*.jsonl"), None), "a journal")

    def records(self, number: int) -> None:
        """Waits until so many records are in the journal."""
        path = self.journal()
        wait_for(lambda: path.read_bytes().count(b'"kind":"record"') >= number, f"{number} records")


@pytest.fixture
def program(root: Path, tmp_path: Path) -> Program:
    """See `Program`."""
    return Program(root, tmp_path / "home")


@pytest.fixture(scope="session")
def processes():
    """`wait_for`, `children` and `alive`."""

    class Processes:
        pass

    Processes.wait_for = staticmethod(wait_for)
    Processes.children = staticmethod(children)
    Processes.alive = staticmethod(alive)
    return Processes


class Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.stages: list[str] = []
        self.ended: list[Record] = []

    def begin(self, run: str, todo: Collection[object], finished: int, metrics: Collection[Metric]) -> None:
        self.begun.append((len(todo), finished))

    def stage(self, replicate, name, cell) -> None:
        self.stages.append(f"{name} {cell.implementation.name}" if cell else name)

    def end(self, record: Record) -> None:
        self.ended.append(record)


@pytest.fixture
def told() -> Told:
    """See `Told`."""
    return Told()


@pytest.fixture
def write_root(tmp_path: Path):
    """Writes files, given as path and text, into a root of their own."""

    def write(**files: str) -> Path:
        folder = tmp_path / "written"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            path = folder / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return folder

    return write


class NVMLError(Exception):
    """What pynvml raises for a field that a board lacks."""


class Library:
    """Functions named as pynvml's; each list is given value by value, its last one for ever."""

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVMLError = NVMLError

    def __init__(self, **answers) -> None:
        self.answers = {
            "reasons": [0],
            "energy": [0],
            "sm": [1980],
            "memory": [2619],
            "temperature": [40],
            "power": [400_000],
        } | answers

    def _next(self, name: str):
        values = self.answers[name]
        if values is None:
            raise NVMLError(f"{name} is not supported")
        return values.pop(0) if len(values) > 1 else values[0]

    def nvmlDeviceGetClockInfo(self, handle, kind: int) -> int:
        return self._next("sm" if kind == self.NVML_CLOCK_SM else "memory")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle) -> int:
        return self._next("reasons")

    def nvmlDeviceGetTemperature(self, handle, sensor: int) -> int:
        return self._next("temperature")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle) -> int:
        return self._next("energy")

    def nvmlDeviceGetPowerUsage(self, handle) -> int:
        return self._next("power")

    def nvmlDeviceGetUtilizationRates(self, handle) -> SimpleNamespace:
        return SimpleNamespace(gpu=97, memory=60)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlShutdown(self) -> None:
        self.answers["shut"] = True


@pytest.fixture
def nvml() -> Callable[..., Nvml]:
    """Makes an `Nvml` on such a library."""
    return lambda **answers: Nvml(Library(**answers), SimpleNamespace())


@pytest.fixture
def make_repository(tmp_path: Path) -> Callable[[str], Repository]:
    """Makes an empty repository of a name."""
    return lambda name: Repository(tmp_path / name)


@pytest.fixture
def sleeper(make_repository) -> Repository:
    """See `sleeping`."""
    return sleeping(make_repository("sleeper"))
