"""The device's own account of itself, through NVML. Read between batches of samples, never inside one.

Every call may fail alone (a field that this board lacks, a deprecated getter): what does not answer is None.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ...registry.store.metric import CLOCK, POWER, TEMPERATURE, UTILIZATION
from ...registry.store.record import Telemetry

HARDWARE_SLOWDOWN = 0x0000000000000008
THROTTLE = {
    0x0000000000000004: "software power cap",
    HARDWARE_SLOWDOWN: "hardware slowdown",
    0x0000000000000010: "sync boost",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "hardware power brake",
}
"""Clocks-event reasons (NVML, nvmlClocksEventReasons) that mean slower clocks than asked for."""
POWER_INSTANT = 186
"""NVML_FI_DEV_POWER_INSTANT. From Ampere on `nvmlDeviceGetPowerUsage` is a mean over the last second."""
ACCURACY = 0.02
"""Mean power from the energy counter is known if it may be off by this share at most."""
SETTLED_S = 1.0
"""Over less than this, readings of power and utilization tell of what ran before: NVML's are means over up to a
second."""
LOOK_S = 0.005
"""Between two looks at the energy counter beside other work."""
BESIDE_S = 0.1
"""Between two readings beside work that others do."""
STEPS_KNOWN = 4
"""After so many steps of the energy counter it is known about when the next one comes."""
EARLY = 0.6
"""Share of the shortest of them that is let pass without a look: the next may be a good deal shorter yet."""
READINGS_S = 0.02
"""Power, temperature and utilization are read at most this often: the board does not renew them faster."""


class Nvml:
    """A handle on one GPU. `open` gives None where there is no NVML or no such GPU."""

    def __init__(self, library: Any, handle: Any) -> None:
        self.library = library
        self.handle = handle

    @classmethod
    def open(cls, uuid: str | None = None) -> Nvml | None:
        """The GPU of that UUID (as CUDA gives it, without prefix), or the first one."""
        import pynvml

        try:
            pynvml.nvmlInit()
            if uuid is None:
                return cls(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        except pynvml.NVMLError:
            return None

    def get(self, name: str, *arguments: Any) -> Any:
        """`nvmlDeviceGet<name>(handle, …)`, or None where it does not answer."""
        try:
            return getattr(self.library, f"nvmlDeviceGet{name}")(self.handle, *arguments)
        except (self.library.NVMLError, AttributeError):
            return None

    def system(self, name: str) -> Any:
        """`nvmlSystemGet<name>()`, or None."""
        try:
            return getattr(self.library, f"nvmlSystemGet{name}")()
        except (self.library.NVMLError, AttributeError):
            return None

    def power_w(self) -> float | None:
        """The board's power now, in watts."""
        for found in self.get("FieldValues", [POWER_INSTANT]) or ():
            if found.nvmlReturn == 0 and found.value.uiVal:
                return float(found.value.uiVal) / 1e3
        milliwatts = self.get("PowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def clock(self, memory: bool) -> int | None:
        """MHz now, of the multiprocessors or the memory."""
        clock = self.get("ClockInfo", self.library.NVML_CLOCK_MEM if memory else self.library.NVML_CLOCK_SM)
        return None if clock is None else int(clock)

    def temperature(self) -> int | None:
        """°C now."""
        found = self.get("Temperature", self.library.NVML_TEMPERATURE_GPU)
        return None if found is None else int(found)

    def reasons(self) -> int:
        """The clocks-event reasons now, as NVML's bit mask; 0 where it does not answer."""
        return int(self.get("CurrentClocksEventReasons") or 0)


class AmdSmi(Nvml):
    """The same of an AMD GPU, through the package amdsmi that comes with ROCm: its answers under NVML's names.

    Of clocks-event reasons it gives what its throttle status says as one. Not run on a GPU yet.
    """

    @classmethod
    def open(cls, index: int = 0) -> AmdSmi | None:  # type: ignore[override]  # amdsmi knows devices by their place
        """The GPU of that place; None where there is no amdsmi or no such GPU."""
        try:
            import amdsmi
        except (ImportError, OSError, KeyError):  # it loads a library of ROCm's, by a path that it may not know
            return None
        try:
            amdsmi.amdsmi_init()
            return cls(amdsmi, amdsmi.amdsmi_get_processor_handles()[index])
        except (amdsmi.AmdSmiException, IndexError):
            return None

    def get(self, name: str, *arguments: Any) -> Any:
        """What NVML would call so, or None."""
        ask = getattr(self, f"_{name}", None)
        if ask is None:
            return None
        try:
            return ask(*arguments)
        except (
            self.library.AmdSmiException,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
        ):  # a field that says "N/A"
            return None

    def system(self, name: str) -> Any:
        """The driver's version; nothing else."""
        if name != "DriverVersion":
            return None
        try:
            return self.library.amdsmi_get_gpu_driver_info(self.handle)["driver_version"]
        except (self.library.AmdSmiException, KeyError):
            return None

    def clock(self, memory: bool) -> int | None:
        """MHz now, of the compute units or the memory."""
        found: int | None = self.get("ClockInfo", memory)
        return found

    def _ClockInfo(self, memory: bool) -> int:
        kinds = self.library.AmdSmiClkType
        return int(self.library.amdsmi_get_clock_info(self.handle, kinds.MEM if memory else kinds.GFX)["clk"])

    def temperature(self) -> int | None:
        """°C of the hottest place now."""
        found: int | None = self.get("Temperature")
        return found

    def _Temperature(self) -> int:
        kinds, metric = self.library.AmdSmiTemperatureType, self.library.AmdSmiTemperatureMetric.CURRENT
        return int(self.library.amdsmi_get_temp_metric(self.handle, kinds.HOTSPOT, metric))

    def _TotalEnergyConsumption(self) -> int:
        """Millijoules: the counter times its resolution, which is in microjoules."""
        told = self.library.amdsmi_get_energy_count(self.handle)
        return int(told["energy_accumulator"] * told["counter_resolution"] / 1e3)

    def _PowerUsage(self) -> int:
        """Milliwatts of the socket."""
        return int(self.library.amdsmi_get_power_info(self.handle)["socket_power"]) * 1000

    def _CurrentClocksEventReasons(self) -> int:
        status = self.library.amdsmi_get_gpu_metrics_info(self.handle)["throttle_status"]
        return HARDWARE_SLOWDOWN if status in (True, 1) else 0

    def _ComputeRunningProcesses(self) -> list[Any]:
        return list(self.library.amdsmi_get_gpu_process_list(self.handle))


@dataclass(frozen=True)
class Step:
    """The energy counter moved: to what, when that was seen, and by how much earlier it may have happened."""

    seen_s: float
    late_s: float
    millijoules: int

    def until(self, later: Step) -> float:
        """Seconds from this step to a later one, each taken to have happened in the middle of when it may have."""
        return later.seen_s - self.seen_s - (later.late_s - self.late_s) / 2

    def power_w(self, later: Step, accuracy: float = ACCURACY) -> float | None:
        """Mean power from this step to a later one, in watts; None where it may be off by more than `accuracy`."""
        seconds = self.until(later)
        if seconds <= 0 or (self.late_s + later.late_s) / 2 > accuracy * seconds:
            return None
        return (later.millijoules - self.millijoules) / 1e3 / seconds


class Counter:
    """NVML's counter of a board's energy, which moves in steps, 20 to 100 ms apart by board.

    Between any two readings it is off by up to a step at either end, which over a second is a tenth of all power.
    From one step to another it is right, but for how late each was seen.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._last: tuple[float, int] | None = None

    def due(self, now_s: float) -> bool:
        """Whether it may move from now on: the last steps are known, and most of the shortest of them has passed.

        Looks before that would say nothing, and those of several processes wait for each other in the driver.
        """
        last = self.steps[-STEPS_KNOWN:]
        if len(last) < STEPS_KNOWN:
            return True
        shortest = min(b.seen_s - a.seen_s for a, b in pairwise(last))
        return now_s - last[-1].seen_s >= EARLY * shortest

    def read(self, now_s: float, millijoules: int) -> None:
        """Takes in a reading."""
        if self._last is not None:
            before_s, before = self._last
            if millijoules > before:
                self.steps.append(Step(now_s, now_s - before_s, millijoules))
            elif millijoules < before:  # the driver was loaded anew
                self.steps.clear()
        self._last = now_s, millijoules


def strangers(seen: Sequence[int], own: Collection[int]) -> int:
    """How many processes on a GPU are not the case's. Ranks open their peers' GPUs too.

    Within a container they have other numbers than the driver's: then as many are ours as there are.
    """
    if any(x in own for x in seen):
        return sum(x not in own for x in seen)
    return max(0, len(seen) - len(own))


class Watch:
    """Collects readings over one measurement. Without NVML it collects nothing. `own` are the case's processes,
    by number; by default this one.
    """

    def __init__(
        self, nvml: Nvml | None, clock: Callable[[], float] = time.monotonic, own: Collection[int] = ()
    ) -> None:
        self._nvml = nvml
        self._clock = clock
        self._sm: list[int] = []
        self._memory: list[int] = []
        self._mask = 0
        self._temperature: int | None = None
        self._power: list[float] = []
        self._utilization: list[float] = []
        self._counter = Counter()
        self._spans: list[tuple[Step, Step]] = []
        self._read_s = -READINGS_S
        self._begin_s: float | None = None
        self._settled = False
        self.throttled: list[int] = []
        found = nvml.get("ComputeRunningProcesses") if nvml is not None else None
        self._others = strangers([getattr(x, "pid", 0) for x in found or ()], own or (os.getpid(),))

    def company(self) -> tuple[str, ...]:
        """A remark where other processes had the GPU open as sampling began."""
        return (f"{self._others} other processes were on the GPU",) if self._others else ()

    def read(self, first: int = 0, last: int = 0) -> None:
        """One reading; the samples `first` to `last` are marked if a throttle reason is raised now."""
        if self._nvml is None:
            return
        for values, memory in ((self._sm, False), (self._memory, True)):
            if (clock := self._nvml.clock(memory)) is not None:
                values.append(clock)
        mask = self._nvml.reasons()
        self._mask |= mask
        if any(mask & bit for bit in THROTTLE):
            self.throttled.extend(range(first, last))
        now = self._clock()
        self._begin_s = now if self._begin_s is None else self._begin_s
        energy = self._nvml.get("TotalEnergyConsumption")
        if energy is not None:
            self._counter.read(now, int(energy))
        if now - self._read_s < READINGS_S:
            return
        self._read_s = now
        self._settled = now - self._begin_s >= SETTLED_S
        self._temperature = self._nvml.temperature()
        if (power := self._nvml.power_w()) is not None:
            self._power.append(power)
        if (rates := self._nvml.get("UtilizationRates")) is not None:
            self._utilization.append(float(rates.gpu))

    def power(self) -> float | None:
        """Mean power from the first step of the energy counter to the last, where there is any of work alone of
        all such; None where that is too coarse.
        """
        steps = self._counter.steps
        if not self._spans:
            return steps[0].power_w(steps[-1]) if steps else None
        seconds = sum(first.until(last) for first, last in self._spans)
        if sum(x.late_s / 2 for span in self._spans for x in span) > ACCURACY * seconds:
            return None
        return sum(last.millijoules - first.millijoules for first, last in self._spans) / 1e3 / seconds

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Reads the energy counter beside work that takes seconds, in a thread: `power` is then that of such work
        alone, and not of what lies between.
        """
        if self._nvml is None:
            yield
            return
        counter = Counter()
        nvml, clock = self._nvml, self._clock

        def look() -> None:
            millijoules = nvml.get("TotalEnergyConsumption")  # other threads go on meanwhile
            if millijoules is not None:
                counter.read(clock(), int(millijoules))

        with _repeated(look, LOOK_S, "energy"):
            yield
        if len(counter.steps) > 1:
            self._spans.append((counter.steps[0], counter.steps[-1]))

    @contextlib.contextmanager
    def beside(self, every_s: float = BESIDE_S) -> Iterator[None]:
        """Reads beside work that has no place to read in between: another process's, or steps queued ahead."""
        if self._nvml is None:
            yield
            return
        try:
            with _repeated(self.read, every_s, "telemetry"):
                yield
        finally:
            self.read()

    def metrics(self) -> dict[str, float]:
        """The board's state by the names of metrics, a number each; what did not answer is left out, and power and
        utilization after less than `SETTLED_S`.
        """
        found = {
            POWER.name: fmean(self._power) if self._power and self._settled else None,
            TEMPERATURE.name: self._temperature,
            CLOCK.name: median(self._sm) if self._sm else None,
            UTILIZATION.name: fmean(self._utilization) if self._utilization and self._settled else None,
        }
        return {name: float(x) for name, x in found.items() if x is not None}

    def telemetry(self) -> Telemetry | None:
        """What was seen, or None without NVML."""
        if self._nvml is None:
            return None
        return Telemetry(
            sm_mhz=(min(self._sm), max(self._sm)) if self._sm else None,
            memory_mhz=(min(self._memory), max(self._memory)) if self._memory else None,
            power_w=self.power() or (fmean(self._power) if self._power else None),
            temperature_c=self._temperature,
            reasons=tuple(name for bit, name in THROTTLE.items() if self._mask & bit),
        )


@contextlib.contextmanager
def _repeated(look: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Calls it in a thread of that name, at once and then at such intervals, until the block ends."""
    done = threading.Event()

    def looks() -> None:
        while not done.is_set():
            look()
            done.wait(every_s)

    looking = threading.Thread(target=looks, name=name, daemon=True)
    looking.start()
    try:
        yield
    finally:
        done.set()
        looking.join()


def close(nvml: Nvml | None) -> None:
    """Ends the NVML session."""
    if nvml is not None:
        with contextlib.suppress(nvml.library.NVMLError):
            nvml.library.nvmlShutdown()
