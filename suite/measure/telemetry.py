"""The device's own account of itself, through NVML. Read between batches of samples, never inside one.

Every call may fail alone (a field that this board lacks, a deprecated getter): what does not answer is None.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from ...registry.store.record import Telemetry

THROTTLE = {
    0x0000000000000004: "software power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000010: "sync boost",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "hardware power brake",
}
"""Clocks-event reasons (NVML, nvmlClocksEventReasons) that mean slower clocks than asked for."""


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

    def reasons(self) -> int:
        """The clocks-event reasons now, as NVML's bit mask; 0 where it does not answer."""
        return int(self.get("CurrentClocksEventReasons") or 0)


class Watch:
    """Collects readings over one measurement. Without NVML it collects nothing."""

    def __init__(self, nvml: Nvml | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._sm: list[int] = []
        self._memory: list[int] = []
        self._mask = 0
        self._temperature: int | None = None
        self._energy: list[tuple[float, int]] = []
        self.throttled: list[int] = []
        # Our own process is one of them, though within a container it has another number there.
        found = nvml.get("ComputeRunningProcesses") if nvml is not None else None
        self._others = max(0, len(found) - 1) if found is not None else 0

    def company(self) -> tuple[str, ...]:
        """A remark where other processes had the GPU open as sampling began."""
        return (f"{self._others} other processes were on the GPU",) if self._others else ()

    def read(self, first: int = 0, last: int = 0) -> None:
        """One reading; the samples `first` to `last` are marked if a throttle reason is raised now."""
        if self._nvml is None:
            return
        library = self._nvml.library
        for values, kind in ((self._sm, library.NVML_CLOCK_SM), (self._memory, library.NVML_CLOCK_MEM)):
            clock = self._nvml.get("ClockInfo", kind)
            if clock is not None:
                values.append(int(clock))
        mask = self._nvml.reasons()
        self._mask |= mask
        if any(mask & bit for bit in THROTTLE):
            self.throttled.extend(range(first, last))
        self._temperature = self._nvml.get("Temperature", library.NVML_TEMPERATURE_GPU)
        energy = self._nvml.get("TotalEnergyConsumption")
        if energy is not None:
            self._energy.append((self._clock(), int(energy)))

    def power(self) -> float | None:
        """Mean power over the readings, from the energy counter; None under 0.1 s, where it is too coarse."""
        if len(self._energy) < 2:
            return None
        (begin, first), (end, last) = self._energy[0], self._energy[-1]
        return (last - first) / 1e3 / (end - begin) if end - begin >= 0.1 and last > first else None

    def telemetry(self) -> Telemetry | None:
        """What was seen, or None without NVML."""
        if self._nvml is None:
            return None
        return Telemetry(
            sm_mhz=(min(self._sm), max(self._sm)) if self._sm else None,
            memory_mhz=(min(self._memory), max(self._memory)) if self._memory else None,
            power_w=self.power(),
            temperature_c=self._temperature,
            reasons=tuple(name for bit, name in THROTTLE.items() if self._mask & bit),
        )


def close(nvml: Nvml | None) -> None:
    """Ends the NVML session."""
    if nvml is not None:
        with contextlib.suppress(nvml.library.NVMLError):
            nvml.library.nvmlShutdown()
