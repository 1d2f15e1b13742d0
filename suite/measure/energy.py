"""The energy of a call, from the board's own counter, over windows that are long enough to know it.

Calls follow each other back to back, so that nothing else is in the windows: between the samples of a latency lie
flushes of the cache, waiting and the host's work. A window goes from one step of the counter to another
(`telemetry.Counter`). Readings of power, which the counter is not made of, are integrated over the same time and
must agree. Where any of that cannot be had there is no energy, and a reason.

A look at the counter takes microseconds or, in some virtual machines, milliseconds: the queue is filled first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from .telemetry import READINGS_S, SETTLED_S, Counter, Nvml, Step

if TYPE_CHECKING:
    import torch

WINDOWS = 8
"""As many at least. At its power limit a board draws more than that for some tenths of a second, then less, before
it settles: fewer windows have the one or the other."""
WINDOW_S = 0.1
"""The least length of a window: one step of the slowest counter, five of a quick one."""
WINDOW_ACCURACY = 0.05
"""What one window may be off by: the next begins where it ends, so that what one has too much the other lacks. All
windows together are held to `telemetry.ACCURACY`."""
SETTLE_S = 0.2
"""Calls run so long before the first window: power and clocks follow the load."""
LIMIT_S = 3.0
"""Windows are not waited for any longer."""
IDLE = 0.02
"""Share of the times that work was queued at which the device may have had none left."""
STARVED = 0.1
"""At this share the host is too slow for certain, and nothing more is waited for."""
AGREE = 0.05
"""By how much the counter and the readings of power may differ: the board's sensor is right to 5 %."""
PAUSE_S = 1e-4
"""Between two looks at the counter while the device has enough to do."""


class Load(Protocol):
    """Calls of one kind, back to back on a device."""

    def room(self) -> bool:
        """Whether the device should be given more."""
        ...

    def more(self) -> int:
        """Queues calls, and waits for nothing; how many."""
        ...

    def wait(self) -> None:
        """Returns when all that was queued is done."""
        ...

    @property
    def idle(self) -> float:
        """Share of the times that work was queued, the first left out, at which the device had none left."""
        ...


@dataclass
class Queued:
    """Work on the current CUDA stream, some of it ahead of the device: `launch` queues `calls` calls."""

    launch: Callable[[], object]
    calls: int
    ahead: int
    _ends: deque[torch.cuda.Event] = field(default_factory=deque)
    _queued: int = 0
    _empty: int = 0

    def room(self) -> bool:
        while self._ends and self._ends[0].query():
            self._ends.popleft()
        return len(self._ends) < self.ahead

    def more(self) -> int:
        import torch

        self._empty += bool(self._queued) and not self._ends
        self.launch()
        end = torch.cuda.Event()
        end.record()
        self._ends.append(end)
        self._queued += 1
        return self.calls

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()
        self._ends.clear()

    @property
    def idle(self) -> float:
        return self._empty / max(1, self._queued - 1)


@dataclass(frozen=True)
class Energy:
    """Joules of a call, a number a window, and the milliseconds that it took there: joules over seconds are watts.

    None of both where the energy cannot be known, for the `reason` given. `utilization` is NVML's, in percent, of
    the last of these calls; None where they were too short for it to be theirs alone.
    """

    joules: tuple[float, ...] = ()
    call_ms: float | None = None
    reason: str = ""
    utilization: float | None = None

    @property
    def watts(self) -> float | None:
        """Mean power of all windows."""
        return fmean(self.joules) / (self.call_ms * 1e-3) if self.call_ms else None


def measured(
    nvml: Nvml,
    load: Load,
    agreed: Callable[[bool | None], bool | None] = lambda room: room,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> Energy:
    """Runs the load until its energy is known, or the limit is reached.

    `agreed` lets rank 0 decide for all ranks of a case when to queue and when it is enough: a collective that one
    rank queues and another does not never ends.
    """
    counter = Counter()
    powers: list[tuple[float, float]] = []
    begin = now = looked_s = read_s = clock()
    calls = 0
    while True:
        room = load.room()
        starved = now - begin > SETTLE_S and load.idle > STARVED
        enough = now - begin >= SETTLED_S and len(windows(counter.steps, begin)) >= WINDOWS
        going = now - begin < LIMIT_S and not starved and not enough
        queues = agreed(room if going else None)
        if queues is None:
            break
        if queues:
            calls += load.more()
            if (now := clock()) - looked_s < READINGS_S:
                continue
        else:
            pause(PAUSE_S)
        if counter.due(now := clock()):
            millijoules = nvml.get("TotalEnergyConsumption")
            now = looked_s = clock()
            if millijoules is not None:
                counter.read(now, int(millijoules))
        if now - read_s >= READINGS_S:
            read_s = now
            if (power := nvml.power_w()) is not None:
                powers.append((now, power))
    # Before the queue is empty: of what was running until now.
    rates = nvml.get("UtilizationRates") if now - begin >= SETTLED_S else None
    load.wait()
    found = known(windows(counter.steps, begin), powers, (clock() - begin) / max(1, calls), load.idle)
    return replace(found, utilization=None if rates is None else float(rates.gpu))


def windows(steps: Sequence[Step], begin_s: float) -> list[tuple[Step, Step, float]]:
    """Windows one after the other, each from a step to a later one, with the mean power of each in watts."""
    out: list[tuple[Step, Step, float]] = []
    first: Step | None = None
    for step in steps:
        if step.seen_s - begin_s < SETTLE_S:
            continue
        if first is None:
            first = step
        elif (
            step.seen_s - first.seen_s >= WINDOW_S and (power := first.power_w(step, WINDOW_ACCURACY)) is not None
        ):
            out.append((first, step, power))
            first = step
    return out


def known(
    found: Sequence[tuple[Step, Step, float]], powers: Sequence[tuple[float, float]], call_s: float, idle: float
) -> Energy:
    """The energy of calls that took `call_s` each, from windows and from readings of power, (seconds, watts)."""
    if idle > IDLE:
        return Energy(
            reason="back to back the device waits for the host, and what it draws then is not the call's"
        )
    if len(found) < WINDOWS:
        return Energy(reason=f"the energy counter gave {len(found)} of {WINDOWS} windows in {LIMIT_S:g} s")
    first, last = found[0][0], found[-1][1]
    if (counted := first.power_w(last)) is None:
        return Energy(reason="the energy counter's steps were seen too late")
    sampled = integral([x for x in powers if first.seen_s <= x[0] <= last.seen_s])
    if sampled is not None and abs(sampled / counted - 1) > AGREE:
        return Energy(reason=f"the energy counter says {counted:.0f} W, readings of power {sampled:.0f} W")
    return Energy(tuple(power * call_s for _, _, power in found), call_s * 1e3)


def integral(powers: Sequence[tuple[float, float]]) -> float | None:
    """Mean power of (seconds, watts), by trapezia; None for fewer than two."""
    if len(powers) < 2:
        return None
    area = sum((b - a) * fmean((p, q)) for (a, p), (b, q) in pairwise(powers))
    return area / (powers[-1][0] - powers[0][0])
