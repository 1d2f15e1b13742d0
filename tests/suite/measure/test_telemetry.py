"""What is read of a GPU, and what is made of boards that do not answer."""

from __future__ import annotations

import threading
import time

import pynvml
import pytest
from kernelmark.registry.store.record import Telemetry
from kernelmark.suite.measure import telemetry
from kernelmark.suite.measure.telemetry import Nvml, Watch, close, strangers


def test_a_watch_collects_extremes_and_reasons(nvml):
    now = iter([0.0, 0.01, 1.0, 1.01])
    watch = Watch(
        nvml(
            sm=[1980, 1200, 1500],
            memory=[2619],
            temperature=[40, 70],
            reasons=[0x1, 0x4, 0x4, 0x80],  # idle is no reason
            energy=[1_000_000, 1_010_000, 1_010_000, 1_360_000],
            power=[300_000, 360_000],
        ),
        clock=lambda: next(now),
    )
    watch.read()
    watch.read()  # so soon that the board has nothing new but its clocks
    watch.read(0, 3)
    watch.read(3, 5)
    assert watch.throttled == [0, 1, 2, 3, 4]
    assert watch.telemetry() == Telemetry(
        sm_mhz=(1200, 1980),
        memory_mhz=(2619, 2619),
        power_w=pytest.approx(350.0),  # 350 J in 1 s from step to step, millijoules as NVML counts
        temperature_c=70,
        reasons=("software power cap", "hardware power brake"),
    )


def test_a_watch_reads_beside_what_others_do(nvml):
    """Before, meanwhile and after; without a board there is nothing to read and no thread."""
    clocks = [*range(1000, 1100)]
    watch, seen = Watch(nvml(sm=clocks)), threading.Event()
    with watch.beside(every_s=0.001):
        while len(clocks) > 95:
            seen.wait(0.001)
    lowest, highest = watch.telemetry().sm_mhz
    assert (lowest, highest) == (1000, clocks[0] - 1)
    before = threading.active_count()
    with Watch(None).beside():
        assert threading.active_count() == before


@pytest.mark.parametrize(("last_s", "known"), [(1.1, True), (0.9, False)])
def test_readings_of_power_tell_of_what_ran_before_for_a_second(nvml, last_s, known):
    now = iter([0.0, 0.5, last_s])
    watch = Watch(nvml(power=[90_000, 300_000, 510_000]), clock=lambda: next(now))
    for _ in range(3):
        watch.read()
    found = watch.metrics()
    assert ("power" in found, "utilization" in found) == (known, known)
    assert found.get("power") == (300.0 if known else None)


@pytest.mark.parametrize(
    ("energy", "times"),
    [
        ([5], [0.0]),
        ([5, 9000], [0.0, 2.0]),
        ([5, 5], [0.0, 1.0]),
        ([9, 5], [0.0, 1.0]),
        ([5, 6, 7], [0.0, 0.1, 0.2]),
    ],
)
def test_no_power_of_too_little(nvml, energy, times):
    now = iter(times)
    watch = Watch(nvml(energy=list(energy)), clock=lambda: next(now))
    for _ in times:
        watch.read()
    assert watch.power() is None


def test_a_board_that_answers_nothing(nvml):
    silent = nvml(sm=None, memory=None, temperature=None, reasons=None, energy=None, power=None)
    watch = Watch(silent)
    watch.read(0, 5)
    assert watch.telemetry() == Telemetry()
    assert watch.throttled == []
    assert silent.get("NoSuchField") is None
    assert silent.system("NoSuchField") is None
    assert silent.system("DriverVersion") == b"580.95.05"


def test_without_nvml():
    watch = Watch(None)
    watch.read(0, 5)
    assert watch.telemetry() is None
    assert watch.power() is None
    close(None)


def test_close(nvml):
    here = nvml()
    close(here)
    assert here.library.answers["shut"]


def test_open(monkeypatch):
    """By UUID as CUDA gives it; where there is no driver, none."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: f"gpu {index}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    assert Nvml.open().handle == "gpu 0"
    assert Nvml.open("12-ab").handle == "GPU-12-ab"

    def fails() -> None:
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    assert Nvml.open() is None


@pytest.mark.parametrize(
    ("seen", "own", "others"),
    [
        ([71], [71], 0),
        ([71, 72, 73], [71, 72], 1),  # of ranks, each of which opens its peers' GPUs
        ([72], [71, 72], 0),
        ([9071, 9072, 9073], [1, 2], 1),  # a container's numbers
        ([9071], [1, 2, 3], 0),
        ([], [71], 0),
    ],
)
def test_ranks_of_a_case_are_no_strangers(seen, own, others):
    assert strangers(seen, own) == others


@pytest.mark.parametrize(
    ("processes", "said"), [(None, ()), (0, ()), (1, ()), (3, ("2 other processes were on the GPU",))]
)
def test_who_else_is_on_the_gpu(nvml, processes, said):
    here = nvml()
    if processes is not None:
        here.library.nvmlDeviceGetComputeRunningProcesses = lambda handle: [object()] * processes
    assert Watch(here).company() == said
    assert Watch(None).company() == ()


class Steady:
    """A board that draws 400 W at work and 100 W else; its counter moves every 20 ms."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.pauses: list[tuple[float, float]] = []

    def nvmlDeviceGetTotalEnergyConsumption(self, handle) -> int:
        now = (time.monotonic() - self.begin) // 0.02 * 0.02
        idle = sum(max(0.0, min(end, now) - begin) for begin, end in self.pauses)
        return int(1e3 * (400 * now - 300 * idle))

    def idle(self, seconds: float) -> None:
        begin = time.monotonic() - self.begin
        self.pauses.append((begin, begin + seconds))
        time.sleep(seconds)


def test_power_is_that_of_the_work_and_not_of_what_lies_between(monkeypatch):
    monkeypatch.setattr(telemetry, "ACCURACY", 0.5)  # steps are seen late on a busy machine
    board = Steady()
    watch = Watch(Nvml(board, None))
    for _ in range(3):
        with watch.during():
            time.sleep(0.3)
        board.idle(0.3)
    assert watch.power() == pytest.approx(400, rel=0.2)
    with Watch(None).during():
        pass


def test_no_power_of_work_that_was_over_before_the_counter_moved_twice():
    watch = Watch(Nvml(Steady(), None))
    with watch.during():
        time.sleep(0.001)
    assert watch.power() is None
