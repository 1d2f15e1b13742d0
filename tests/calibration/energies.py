"""The energy of a call as kernelmark measures it, against an integral of power that shares no code with it.

    python tests/calibration/energies.py --output FILE [--rounds 3] [--seconds 3]

Needs a GPU and NVML. For each of a few rows of different power, in turns: the whole measurement that a run makes
(`Trial`, energy and all), then the same call back to back for some seconds. Meanwhile another process reads the
board's power and its energy counter by NVML itself, with the times of its readings; joules of a call are the
integral of power between two ends of calls, over the calls between them. `average` is of NVML's readings that are
means of about a second, `instant` of those of the moment, and `counter` the energy counter's over the whole span.

What is held to 2 % is the row's energy over `instant` (over `average` where the board has no `instant`).
`watts_together` is what the other process saw while the row's energy was measured. Clocks may be others then than
over seconds on end: where energies differ and these watts do not, the machine changed and not the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

KERNELS = (
    # Of memory, of the matrix units at the power cap, of both, and of a few multiprocessors only.
    ("rms_norm", {"B": 8, "S": 8192, "D": 4096}, "bf16", "torch"),
    ("matmul", {"M": 8192, "N": 8192, "K": 8192}, "bf16", "torch"),
    ("attention", {"B": 4, "H": 32, "Hkv": 32, "S": 4096, "D": 128}, "bf16", "sdpa_flash"),
    ("softmax", {"M": 64, "D": 32768}, "fp32", "torch"),
)
LIMIT = 0.02
SETTLE_S = 1.5
"""Longer than what NVML's readings of power are a mean of."""
BATCH_MS = 40.0
AHEAD = 3
"""Batches of calls that are queued at a time."""
GRAPHED_MS = 1.0
"""Shorter calls are replayed by a graph: the host would be too slow for them."""
GRAPHED_CALLS = 100
POLL_S = 2e-4

Reading = tuple[float, float]
"""Seconds of the system's monotonic clock, and watts or joules then."""


def watch(uuid: str) -> None:
    """Reads until standard input ends, then prints all: by kind, pairs of seconds and watts or joules."""
    import select

    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def asked(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        before = time.monotonic()
        try:
            answer = function(handle, *arguments)
        except pynvml.NVMLError:
            answer = None
        return (before + time.monotonic()) / 2, answer

    found: dict[str, list[Reading]] = {"instant": [], "average": [], "counter": []}
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.005)[0]:
        when, fields = asked(pynvml.nvmlDeviceGetFieldValues, [pynvml.NVML_FI_DEV_POWER_INSTANT])
        instant = fields[0].value.uiVal / 1e3 if fields and fields[0].nvmlReturn == 0 else None
        average_s, average = asked(pynvml.nvmlDeviceGetPowerUsage)
        counter_s, counter = asked(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        if instant:
            found["instant"].append((when, instant))
        if average is not None:
            found["average"].append((average_s, average / 1e3))
        if counter is not None:
            found["counter"].append((counter_s, counter / 1e3))
    print(json.dumps(found))


@contextlib.contextmanager
def watched(uuid: str) -> Iterator[dict[str, list[Reading]]]:
    """Readings by kind, in a process of its own; they are there when this ends."""
    found: dict[str, list[Reading]] = {}
    with subprocess.Popen(
        [sys.executable, __file__, "--watch", uuid],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # "ready"
        try:
            yield found
        finally:
            process.stdin.close()
            found |= json.loads(process.stdout.read())


def mean_power(readings: Sequence[Reading], begin_s: float, end_s: float) -> float | None:
    """Mean watts between two times, by trapezia between readings; None where readings do not reach over both."""
    times = [when for when, _ in readings]
    if len(times) < 2 or begin_s < times[0] or end_s > times[-1] or end_s <= begin_s:
        return None

    def at(when: float) -> float:
        i = min(max(1, bisect_left(times, when)), len(times) - 1)
        (a, p), (b, q) = readings[i - 1], readings[i]
        return p + (q - p) * (when - a) / (b - a) if b > a else q

    inside = [(when, watts) for when, watts in readings if begin_s < when < end_s]
    curve = [(begin_s, at(begin_s)), *inside, (end_s, at(end_s))]
    return sum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairwise(curve)) / (end_s - begin_s)


def counted_power(readings: Sequence[Reading], begin_s: float, end_s: float) -> float | None:
    """Mean watts between the first and the last step of the energy counter between two times."""
    steps = [
        ((before + now) / 2, joules)
        for (before, earlier), (now, joules) in pairwise(readings)
        if joules > earlier and begin_s < before and now < end_s
    ]
    if len(steps) < 2:
        return None
    (first_s, first), (last_s, last) = steps[0], steps[-1]
    return (last - first) / (last_s - first_s)


def driven(call: Callable[[], object], call_ms: float, seconds: float) -> list[tuple[float, int]]:
    """Runs a call back to back; when each batch was seen to end, and how many calls had ended then."""
    import torch

    launch, calls = call, 1
    if call_ms < GRAPHED_MS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(GRAPHED_CALLS):
                call()
        launch, calls = graph.replay, GRAPHED_CALLS
    launches = max(1, math.ceil(BATCH_MS / (calls * call_ms)))
    queue: deque[torch.cuda.Event] = deque()
    ends: list[tuple[float, int]] = []
    begin = time.monotonic()
    while (going := time.monotonic() - begin < seconds) or queue:
        while going and len(queue) < AHEAD:
            for _ in range(launches):
                launch()
            end = torch.cuda.Event()
            end.record()
            queue.append(end)
        if queue[0].query():
            queue.popleft()
            ends.append((time.monotonic(), len(ends) * launches * calls + launches * calls))
        else:
            time.sleep(POLL_S)
    return ends


def integrated(readings: dict[str, list[Reading]], ends: Sequence[tuple[float, int]]) -> dict[str, float | None]:
    """Joules of a call by each kind of reading, and its milliseconds, once power has settled."""
    settled = [x for x in ends if x[0] - ends[0][0] >= SETTLE_S][:-AHEAD]  # while others are queued behind
    (first_s, first), (last_s, last) = settled[0], settled[-1]
    call_s = (last_s - first_s) / (last - first)
    powers = {
        "instant": mean_power(readings["instant"], first_s, last_s),
        "average": mean_power(readings["average"], first_s, last_s),
        "counter": counted_power(readings["counter"], first_s, last_s),
    }
    joules = {kind: None if watts is None else watts * call_s for kind, watts in powers.items()}
    return {**joules, "call_ms": call_s * 1e3, "watts": powers["instant"] or powers["average"]}


def measured(device: Any, kernel: tuple[Any, ...], rounds: int, seconds: float, uuid: str) -> dict[str, Any]:
    """One row: both figures of each round, and the ratio of their medians."""
    from kernelmark.registry.store.metric import BACK_TO_BACK, ENERGY, LATENCY, summarized
    from kernelmark.suite.catalog import Catalog
    from kernelmark.suite.measure.energy import SETTLE_S as UNCOUNTED_S
    from kernelmark.suite.measure.stages import Stages, Trial
    from kernelmark.suite.measure.stopping import Sampling
    from kernelmark.suite.measure.workbench import Workbench

    class Timed(Trial):
        """Knows when its energy was measured."""

        span = (0.0, 0.0)

        def joules(self, call: Any, latency_ms: float) -> Any:
            begin = time.monotonic()
            found = super().joules(call, latency_ms)
            self.span = (begin, time.monotonic())
            return found

    name, axes, dtype, implementation = kernel
    catalog = Catalog.default()
    operator = catalog.operator(name)
    case = operator.case(axes, dtype, "forward")
    load = next(x for x in catalog.of_operator(name) if x.name == implementation).load
    bench = Workbench.build(operator, case, device.torch_device, 1)
    out = []
    for _ in range(rounds):
        trial = Timed(device, bench, "cold", Sampling(), Stages(), with_energy=True)
        with watched(uuid) as together:
            measurement = trial.run(lambda: load()(case))
            time.sleep(0.1)
        call = bench.call(load()(case))
        with watched(uuid) as apart:
            ends = driven(call, median(measurement.samples[LATENCY.name]), seconds + SETTLE_S)
            time.sleep(0.1)
        joules = measurement.samples.get(ENERGY.name)
        call_ms = measurement.samples.get(BACK_TO_BACK.name, [math.nan])[0]
        instant = together["instant"] or together["average"]
        out.append(
            {
                "kernelmark": summarized(joules, ENERGY.summary) if joules else None,
                "windows": joules,
                "kernelmark_ms": call_ms if joules else None,
                "kernelmark_watts": fmean(joules) / (call_ms * 1e-3) if joules else None,
                "watts_together": mean_power(instant, trial.span[0] + UNCOUNTED_S, trial.span[1] - 0.05),
                "remarks": measurement.remarks,
                "independent": integrated(apart, ends),
            }
        )
    return {"row": f"{name} {case.name} {implementation}", "rounds": out, **compared(out)}


def compared(rounds: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Medians over the rounds of both figures, in joules, and what kernelmark says over the other."""
    ours = [x["kernelmark"] for x in rounds if x["kernelmark"] is not None]
    kind = "instant" if all(x["independent"]["instant"] is not None for x in rounds) else "average"
    theirs = [x["independent"][kind] for x in rounds if x["independent"][kind] is not None]
    if not ours or not theirs:
        return {"kernelmark": None, "independent": None, "ratio": None}
    return {
        "kernelmark": median(ours),
        "independent": median(theirs),
        "ratio": median(ours) / median(theirs),
        "watts": median([x["independent"]["watts"] for x in rounds]),
    }


def main() -> None:
    """Prints a line a row, and writes all readings' figures as JSON. Exit code 1 beyond 2 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--watch", metavar="UUID", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        watch(arguments.watch)
        return
    import torch
    from kernelmark.suite.measure.device import Cuda

    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device; torch sees none here")
    device = Cuda.open()
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    rows = []
    with device.using():
        for kernel in KERNELS:
            rows.append(measured(device, kernel, arguments.rounds, arguments.seconds, uuid))
            row = rows[-1]
            told = "no energy" if row["ratio"] is None else f"{row['watts']:.0f} W, ratio {row['ratio']:.4f}"
            print(f"{row['row']}: {told}", flush=True)
            device.release()
    ratios = [row["ratio"] for row in rows]
    within = all(x is not None and abs(x - 1) <= LIMIT for x in ratios)
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "within_2_percent": within}
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    sys.exit(not within)


if __name__ == "__main__":
    main()
