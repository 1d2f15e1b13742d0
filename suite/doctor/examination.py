"""Is this machine fit to measure, and does the harness catch what it must?

The first part reads the machine's state. The second runs planted faults through the same catalog,
supervisor, worker and journal as any run, and looks at what the rows say of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ...registry.analysis.rows import Row, rows, speedup
from ...registry.analysis.statistics import log_mean_interval
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ..catalog import Catalog, Root
from ..measure.stopping import Sampling
from ..measure.telemetry import THROTTLE, Nvml
from ..plan import Plan
from ..run.fingerprint import cpu_governor
from ..run.supervisor import Listener, Run, new_run

PLANTED = Path(__file__).resolve().parent / "planted"
DEADLINE_S = 15.0
REPLICATES = 5
MOST_REPLICATES = 20
SLOWDOWN = 0.05
"""What `slower` is slower by."""


@dataclass(frozen=True)
class Check:
    """One thing looked at. `verdict` is `ok`, `warning` (numbers will be noisier or not comparable),
    `failed`, or for planted faults `caught` and `missed`."""

    name: str
    verdict: Literal["ok", "warning", "failed", "caught", "missed"]
    detail: str


def machine(device: Literal["cuda", "cpu"], home: Home) -> Iterator[Check]:
    """The state of the machine. Reads only."""
    if device == "cuda":
        nvml = Nvml.open()
        if nvml is None:
            yield Check("driver", "failed", "NVML does not answer: is the NVIDIA driver installed and loaded?")
        else:
            yield from _gpu(nvml)
    else:
        yield Check("device", "ok", "CPU: no NVIDIA driver answers here; rows will be labelled CPU")
    yield from _host(home)


def _gpu(nvml: Nvml) -> Iterator[Check]:
    library = nvml.library
    driver, name = nvml.system("DriverVersion"), nvml.get("Name")
    yield Check("driver", "ok", f"{_text(name)}, driver {_text(driver)}")
    now, most = nvml.get("ClockInfo", library.NVML_CLOCK_SM), nvml.get("MaxClockInfo", library.NVML_CLOCK_SM)
    if os.environ.get("KERNELMARK_CLOCKS"):
        yield Check("clocks", "ok", f"locked by the host ({os.environ['KERNELMARK_CLOCKS']}), now {now} MHz")
    else:
        yield Check("clocks", "warning", f"not locked: now {now} of at most {most} MHz; rows will say 'unlocked'")
    limit, default = nvml.get("EnforcedPowerLimit"), nvml.get("PowerManagementDefaultLimit")
    lowered = limit is not None and default is not None and limit < default
    watts = "unknown" if limit is None else f"{limit / 1e3:g} W"
    yield Check(
        "power cap",
        "warning" if lowered else "ok",
        f"{watts}" + (", below the board's default" if lowered else ""),
    )
    others = nvml.get("ComputeRunningProcesses")
    count = len(others or ())
    yield Check(
        "other processes",
        "warning" if count else "ok",
        f"{count} on this GPU: they take time and memory from what is measured"
        if count
        else "none seen on this GPU",
    )
    memory = nvml.get("MemoryInfo")
    if memory is not None:
        scarce = memory.free < 0.8 * memory.total
        yield Check(
            "free memory",
            "warning" if scarce else "ok",
            f"{memory.free / 1e9:.0f} of {memory.total / 1e9:.0f} GB"
            + ("; large cases may not fit" if scarce else ""),
        )
    ecc = nvml.get("EccMode")
    yield Check("ECC", "ok", "unknown" if ecc is None else "on" if ecc[0] else "off")
    mig = nvml.get("MigMode")
    sliced = bool(mig and mig[0])
    yield Check("MIG", "warning" if sliced else "ok", "on: a slice is measured, not the GPU" if sliced else "off")
    temperature = nvml.get("Temperature", library.NVML_TEMPERATURE_GPU)
    raised = [text for bit, text in THROTTLE.items() if nvml.reasons() & bit]
    yield Check(
        "thermal state",
        "warning" if raised else "ok",
        f"{temperature} °C" + (f"; clocks held down by: {', '.join(raised)}" if raised else ""),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _host(home: Home) -> Iterator[Check]:
    governor = cpu_governor()
    if governor is None:
        yield Check("CPU governor", "ok", "not visible here, as in most virtual machines")
    else:
        fixed = governor == "performance"
        yield Check(
            "CPU governor",
            "ok" if fixed else "warning",
            governor + ("" if fixed else "; 'performance' is steadier"),
        )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = load > 0.5 * cores
    yield Check(
        "load",
        "warning" if busy else "ok",
        f"{load:.1f} on {cores} cores" + (": something else is running" if busy else ""),
    )
    folder = home.folder if home.folder.exists() else Path.cwd()
    free = shutil.disk_usage(folder).free
    yield Check("disk", "warning" if free < 1 << 30 else "ok", f"{free / 1e9:.1f} GB free for results")


def planted(device: Literal["cuda", "cpu"], home: Home, listener: Listener) -> Iterator[Check]:
    """Runs the planted faults and says of each whether the harness caught it."""
    catalog = Catalog((Root(PLANTED, f"{__package__}.planted"),))
    sampling = Sampling(min_samples=10, max_samples=200, min_seconds=0.2, max_seconds=0.6, warmup_s=0.2)
    name = new_run()
    cases = tuple(case for x in catalog.operators.values() for grid in x.plans[device] for case in x.expand(grid))
    journal: Journal | None = None
    replicates = REPLICATES
    while journal is None or (replicates <= MOST_REPLICATES and not _resolved(journal)):
        plan = Plan("doctor", cases, replicates, ("cold", "hot"), sampling, DEADLINE_S)
        cells = tuple(x for x in plan.cells(catalog, device) if x.cache == "cold" or x.case.operator == "reread")
        run = Run(
            plan,
            cells,
            catalog,
            device,
            home,
            seed=0,
            name=name,
            roots=(str(PLANTED),),
            ceilings=False,
            listener=listener,
            past=journal,
        )
        journal = read(run.execute())
        replicates += REPLICATES
    yield from judge(journal)


def _slowdown(journal: Journal) -> tuple[float, float, float] | None:
    """How much slower `slower` came out than `honest`, as a share, with its 95 % interval."""
    medians: dict[str, dict[int, float]] = {"honest": {}, "slower": {}}
    for record in journal.records:
        if record.implementation in medians and record.measurement is not None:
            medians[record.implementation][record.replicate] = median(record.primary)
    honest, slower = medians["honest"], medians["slower"]
    ratios = [slower[x] / honest[x] for x in sorted(honest.keys() & slower.keys())]
    if len(ratios) < 2:
        return None
    mean, low, high = log_mean_interval(ratios)
    return mean - 1, low - 1, high - 1


def _resolved(journal: Journal) -> bool:
    found = _slowdown(journal)
    return found is None or found[1] > 0 or found[2] < SLOWDOWN


def judge(journal: Journal) -> Iterator[Check]:
    """What a journal of planted faults shows."""
    found = _slowdown(journal)
    if found is None:
        yield Check("5 % slower", "missed", "honest and slower were not both measured")
    else:
        mean, low, high = found
        caught = low > 0 and low <= SLOWDOWN * 1.5 and high >= SLOWDOWN * 0.5
        yield Check(
            "5 % slower",
            "caught" if caught else "missed",
            f"measured {mean:+.1%}, 95 % interval {low:+.1%} to {high:+.1%}"
            + ("" if caught else ": this machine is too noisy or the timer is wrong"),
        )
    by_name: Mapping[str, Row] = {x.implementation: x for x in rows(journal) if x.cache == "cold"}
    expected = {
        "stale": ("stale output", "incorrect"),
        "nan": ("NaN in the output", "incorrect"),
        "hang": ("never returns", "timeout"),
        "kill": ("kills its process", "crashed"),
        "hoard": ("asks for too much memory", "out_of_memory"),
    }
    if journal.header.device == "cuda":
        expected["corrupt"] = ("corrupts the CUDA context", "error")
    for implementation, (what, status) in expected.items():
        row = by_name.get(implementation)
        seen = "no row" if row is None else f"{row.status}: {row.reason}"
        yield Check(what, "caught" if row is not None and row.status == status else "missed", seen)
    yield _warm(journal)


def _warm(journal: Journal) -> Check:
    """A kernel that is only quick when its input is cached must not look quick in a cold row."""
    times: dict[str, dict[int, float]] = {"cold": {}, "hot": {}}
    for record in journal.records:
        if record.case.operator == "reread" and record.measurement is not None:
            times[record.cache][record.replicate] = median(record.primary)
    ratio = speedup(times["cold"], times["hot"])[0]
    if ratio is None:
        return Check("lives off a warm cache", "missed", "not measured both cold and hot")
    return Check(
        "lives off a warm cache",
        "caught" if ratio >= 1.1 else "missed",
        f"{ratio:.2f} times as fast hot as cold"
        + ("" if ratio >= 1.1 else ": the flush does not empty this cache"),
    )
