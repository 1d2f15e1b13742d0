"""What every device promises the stages, held by the CPU, by devices that are made up, and by what can be asked of
AMD's, Intel's and Apple's without one.

The made-up devices compute on the CPU and are odd in one way each: work ends long after its call, events have no
times, or times that do not move, there is no count of memory, no cache size is known, no fp64.
"""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.record import DEVICES, Case
from kernelmark.suite.measure import cache, device
from kernelmark.suite.measure.device import Accelerator, Cpu, Device, Mps, Rocm, TimerUnavailable, Xpu
from kernelmark.suite.measure.limits import products
from kernelmark.suite.measure.telemetry import AmdSmi, Watch
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.softmax import OPERATOR as SOFTMAX
from kernelmark.suite.run import fingerprint

CASE = Case("x", "x", {}, {}, "fp32", "forward", "", 8, 0)
WORK_S = 0.004


class Clocked:
    """An event of a queue that is worked off in order: its time is that at which what stands before it is done."""

    def __init__(self, queue: Late) -> None:
        self._queue = queue

    def record(self) -> None:
        self.at = self._queue.done

    def elapsed_time(self, later: Clocked) -> float:
        return (later.at - self.at) * 1e3


@dataclasses.dataclass
class Late(Accelerator):
    """A device that works off a queue: a call of `work` returns at once and takes `WORK_S` there."""

    kind: ClassVar = "xpu"
    done: float = 0.0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def work(self, seconds: float = WORK_S) -> None:
        self.done = max(self.done, time.perf_counter()) + seconds

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.done - time.perf_counter()))

    def event(self) -> Any:
        return Clocked(self)


class Timeless(Late):
    """Its events have no times, as some backends' have none."""

    def event(self) -> Any:
        raise RuntimeError("this backend doesn't support events with timing")


class Frozen(Late):
    """Its events say that nothing takes time."""

    def event(self) -> Any:
        return SimpleNamespace(record=lambda: None, elapsed_time=lambda later: 0.0)


class Uncounted(Late):
    counts_memory: ClassVar[bool] = False


ODD = (Late, Timeless, Frozen, Uncounted)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Flushes of 64 KiB, each a millisecond's work of a made-up device."""
    monkeypatch.setattr(cache, "LARGEST_FLUSH", 1 << 16)


def opened(kind: type[Late]) -> Late:
    made = kind()
    made._flush = lambda: made.work(1e-3)
    made._calibrate()
    return made


@pytest.mark.parametrize("kind", [Cpu, *ODD])
def test_the_contract(small, kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    made: Device = Cpu.open() if kind is Cpu else opened(kind)
    assert made.kind in DEVICES
    assert isinstance(made.fp64, bool)
    with made.using():
        made.synchronize()
        made.release()
    for state in ("cold", "hot"):
        timer = made.fallback(state)
        assert timer.batch == 1
        call = (lambda: time.sleep(WORK_S)) if kind is Cpu else made.work
        samples = [x for _ in range(8) for x in timer.sample(call)]
        # Its own time: neither that of a call that only queues, nor that of the flush before it. Work of others
        # adds to some of them.
        assert WORK_S * 0.9e3 < min(samples) < WORK_S * 1.2e3, samples
        assert made.timer(CASE, state, call, "auto").name == timer.name
    if kind is not Cpu:
        for name in ("graph", "cupti"):
            with pytest.raises(TimerUnavailable, match=f"there is no timer '{name}' on xpu"):
                made.timer(CASE, "cold", made.work, name)


@pytest.mark.parametrize(
    ("kind", "timer"),
    [(Late, "events"), (Timeless, "synchronized"), (Frozen, "synchronized"), (Uncounted, "events")],
)
def test_what_an_odd_device_is_timed_by_is_said(kind, timer):
    assert opened(kind).fallback("hot").name == timer


def test_a_busy_queue_hides_the_host(monkeypatch: pytest.MonkeyPatch):
    """A host that takes 2 ms a call leaves no gap in a sample of 4 ms: the queue is filled before."""
    made = opened(Late)
    timer = made.fallback("hot")

    def slow() -> None:
        time.sleep(2e-3)
        made.work()

    timer.sample(slow)  # says how long the host takes
    # A machine with other work may stop this process amid a sample, not amid every one.
    attempts = (timer.sample(slow) for _ in range(8))
    assert any(x == pytest.approx([WORK_S * 1e3] * len(x), rel=0.05) for x in attempts)


@pytest.mark.parametrize(("kind", "bytes"), [(Late, 250), (Uncounted, None)])
def test_peak_memory(kind, bytes, monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "reset_peak_memory_stats": 0,
        "memory_allocated": 100,
        "max_memory_allocated": 350,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    assert opened(kind).peak_memory(lambda: None) == bytes


@pytest.mark.parametrize(("name", "class_"), [("rocm", Rocm), ("xpu", Xpu), ("mps", Mps)])
def test_a_device_that_is_not_here_says_so(name, class_):
    assert device.CLASSES[name] is class_
    assert class_.kind == name
    with pytest.raises((RuntimeError, AssertionError)):
        device.opened(name)
    with pytest.raises(InputError, match=f"no device '{name}' here. Here: cpu. Known: cuda, rocm, xpu, mps, cpu."):
        fingerprint.device_named(name)


def test_devices_are_those_that_torch_is_built_for(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(fingerprint, "has_gpu", lambda: False)
    monkeypatch.setattr(fingerprint, "KFD", tmp_path / "kfd")
    monkeypatch.setattr(fingerprint, "DRM", tmp_path)
    found = {}
    for torch_ in ("2.13.0+cpu", "2.13.0+rocm7.2", "2.13.0+xpu"):
        monkeypatch.setattr(fingerprint, "_version", lambda name, torch_=torch_: torch_)
        found[torch_] = [fingerprint.devices_here()]
    (tmp_path / "kfd").touch()
    (tmp_path / "renderD128" / "device").mkdir(parents=True)
    (tmp_path / "renderD128" / "device" / "vendor").write_text("0x8086\n")
    for torch_, seen in found.items():
        monkeypatch.setattr(fingerprint, "_version", lambda name, torch_=torch_: torch_)
        seen.append(fingerprint.devices_here())
    assert found == {
        "2.13.0+cpu": [["cpu"], ["cpu"]],
        "2.13.0+rocm7.2": [["cpu"], ["rocm", "cpu"]],
        "2.13.0+xpu": [["cpu"], ["xpu", "cpu"]],
    }
    monkeypatch.setattr(fingerprint.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(fingerprint.platform, "machine", lambda: "arm64")
    assert fingerprint.devices_here()[-2:] == ["cpu", "mps"]  # by name alone: the first is the default


@pytest.mark.parametrize(
    ("architecture", "hip", "bytes"),
    [("gfx942:sramecc+:xnack-", "7.2", 256 << 20), ("gfx1100", "7.2", 6 << 20), ("", None, 6 << 20)],
)
def test_the_cache_behind_the_last_level(monkeypatch: pytest.MonkeyPatch, architecture, hip, bytes):
    told = SimpleNamespace(L2_cache_size=6 << 20, gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert cache.last_level_bytes(torch.device("cuda")) == bytes


@pytest.mark.parametrize(("told", "bytes"), [({"last_level_cache_size": 16 << 20}, 16 << 20), ({}, 408 << 20)])
def test_intels_cache_where_torch_says_it(monkeypatch: pytest.MonkeyPatch, told, bytes):
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(**told))
    assert cache.last_level_bytes(torch.device("xpu")) == bytes
    assert cache.last_level_bytes(torch.device("mps")) == 96 << 20


def test_references_without_fp64():
    case = SOFTMAX.case({"M": 3, "D": 17}, "bf16", "forward")
    cpu = torch.device("cpu")
    assert Workbench.build(SOFTMAX, case, cpu, 0).references[0].dtype == torch.float64
    assert Workbench.build(SOFTMAX, case, cpu, 0, fp64=False).references[0].dtype == torch.float32


def test_no_product_of_eight_bits_off_nvidia():
    assert products(opened(Late), 4, "e4m3") == ()


class Amd:
    """amdsmi of a GPU that answers all but its energy."""

    class AmdSmiException(Exception): ...

    AmdSmiClkType = SimpleNamespace(GFX="gfx", MEM="mem")
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT="hotspot")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="current")

    @staticmethod
    def amdsmi_get_clock_info(handle, kind):
        return {"clk": {"gfx": 2100, "mem": 1300}[kind]}

    @staticmethod
    def amdsmi_get_temp_metric(handle, kind, metric):
        return 71

    @classmethod
    def amdsmi_get_energy_count(cls, handle):
        raise cls.AmdSmiException("not supported")

    @staticmethod
    def amdsmi_get_power_info(handle):
        return {"socket_power": 640}

    @staticmethod
    def amdsmi_get_gpu_metrics_info(handle):
        return {"throttle_status": 1}

    @staticmethod
    def amdsmi_get_gpu_process_list(handle):
        return ["ours", "another"]

    @staticmethod
    def amdsmi_get_gpu_driver_info(handle):
        return {"driver_version": "6.16.6"}


def test_telemetry_of_an_amd_gpu():
    gpu = AmdSmi(Amd, "gpu")
    watch = Watch(gpu)
    watch.read(0, 2)
    seen = watch.telemetry()
    assert seen is not None
    assert (seen.sm_mhz, seen.memory_mhz, seen.temperature_c) == ((2100, 2100), (1300, 1300), 71)
    assert (seen.power_w, seen.reasons, watch.throttled) == (640.0, ("hardware slowdown",), [0, 1])
    assert watch.company() == ("1 other processes were on the GPU",)
    assert (gpu.system("DriverVersion"), gpu.system("NVMLVersion"), gpu.get("EccMode")) == ("6.16.6", None, None)
    silent = AmdSmi(SimpleNamespace(AmdSmiException=Amd.AmdSmiException), "gpu")
    assert silent.get("EccMode") is None
    assert AmdSmi.open() is None  # there is no amdsmi here
