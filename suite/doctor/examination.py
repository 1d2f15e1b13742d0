"""Is this machine fit to measure, and does the harness catch what it must?

The first part reads the machine's state. The second runs planted faults through the same catalog,
supervisor, worker and journal as any run, and looks at what the rows say of them.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ...registry.analysis.rows import Row, rows
from ...registry.analysis.statistics import exponential, t_quantile
from ...registry.detection.noise import log_times, trimmed
from ...registry.figures import signed
from ...registry.progress import Tell, untold
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import DeviceKind
from ..catalog import Catalog, Root
from ..measure.stopping import Sampling
from ..measure.telemetry import THROTTLE, Nvml
from ..plan import Cell, Plan
from ..run.fingerprint import cpu_governor
from ..run.listener import Listener
from ..run.progress import Shared
from ..run.supervisor import Run, new_run
from .planted.baselines.hacks import NEED_GPU, OUTCOMES

PLANTED = Path(__file__).resolve().parent / "planted"
DEADLINE_S = 15.0
HANG_S = 4.0
"""The deadline of what never returns, which is waited for."""
SLOWDOWN = 0.05
"""What `slower` is slower by."""
APART = 3.0
"""Processes of one kernel whose times are so many times apart say what else the machine does, and nothing of a
timer."""
REUSE = 1.1
"""How many times as fast hot as cold a kernel is, at least, that lives off a warm cache."""
TIMED = ("honest", "slower", "squares", "by_ends")
"""What is measured in every replicate; faults that end otherwise show in the first. What remembers by some of the
elements is right by chance, one time in sixteen, where the last block exchanged holds one of them.
"""
ENDING = ("hang", "kill", "corrupt")
"""What ends its process."""


@dataclass(frozen=True)
class Extent:
    """How thoroughly the planted faults are looked at: so many replicates, more while timing leaves it open."""

    least: int
    most: int
    seconds: float
    """No replicate is begun later than this after the start."""


GAIN = 0.5
"""What takes less than so much of the work's time has left some of it out."""
FAULTS_COST = 3.0
"""What all the faults together take, in replicates of what is timed."""
QUICK = Extent(3, 4, 20.0)
WHOLE = Extent(5, 20, 90.0)


@dataclass(frozen=True)
class Check:
    """One thing looked at. `verdict` is `ok`, `warning` (numbers will be noisier or not comparable),
    `failed`, or for planted faults `caught`, `missed` (the harness did not see it) and `unsure` (the machine is
    too noisy to say which)."""

    name: str
    verdict: Literal["ok", "warning", "failed", "caught", "missed", "unsure"]
    detail: str


def machine(device: DeviceKind, home: Home) -> Iterator[Check]:
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


def planted(device: DeviceKind, home: Home, tell: Tell = untold, extent: Extent = WHOLE) -> Iterator[Check]:
    """Runs the planted faults and says of each whether the harness caught it.

    What is told is the share of the least that is to be done; a noisy machine needs more, up to the extent's time.
    """
    begin = time.monotonic()
    tell("loading torch", 0.0)
    catalog = Catalog((Root(PLANTED, f"{__package__}.planted"),))
    sampling = Sampling(
        min_samples=10, max_samples=200, min_seconds=0.1, max_seconds=0.4, warmup_s=0.1, energy="never"
    )
    cases = tuple(case for x in catalog.operators.values() for grid in x.plans[device] for case in x.expand(grid))
    plan = Plan("doctor", cases, extent.most, ("cold", "hot"), sampling, DEADLINE_S)
    cells = [x for x in plan.cells(catalog, device) if x.cache == "cold" or x.case.operator == "reread"]
    timed = [x for x in cells if x.implementation.name in TIMED]
    faults = [x for x in cells if x not in timed]
    once = replace(plan, replicates=1)

    def run_of(plan: Plan, cells: Sequence[Cell], listener: Listener) -> Run:
        return Run(
            plan,
            tuple(cells),
            catalog,
            device,
            home,
            seed=0,
            name=new_run(),
            roots=(str(PLANTED),),
            ceilings=False,
            listener=listener,
        )

    # What is not timed may run side by side, and most of it is starting: what ends its process has its own.
    alone = [[x for x in faults if x.implementation.name == name] for name in ENDING]
    others = [x for x in faults if x.implementation.name not in ENDING]
    first = FAULTS_COST / (FAULTS_COST + extent.least)
    listener = Shared(tell, len(faults), first / 2, first)  # the other half is starting
    apart = [
        run_of(
            replace(once, deadline_s=HANG_S) if deadly[0].implementation.name == "hang" else once, deadly, listener
        )
        for deadly in (others, *alone)
        if deadly
    ]
    with ThreadPoolExecutor(len(apart)) as pool:
        seen = [read(path) for path in pool.map(Run.execute, apart)]
    run = run_of(plan, timed, Shared(tell, extent.least * len(timed), first))
    with run.session():
        for replicate in range(extent.most):
            late = time.monotonic() - begin > extent.seconds
            if replicate >= min(2, extent.least) and late:
                break
            if replicate >= extent.least and _resolved(read(run.path)):
                break
            run.replicate(replicate, timed)
    journal = read(run.path)
    yield from judge(replace(journal, records=(*journal.records, *(x for other in seen for x in other.records))))


def _times(journal: Journal, name: str, cache: str = "cold") -> dict[int, float]:
    """An implementation's median by replicate."""
    return {
        x.replicate: median(x.primary)
        for x in journal.records
        if x.implementation == name and x.cache == cache and x.measurement is not None
    }


def _ratio(over: Mapping[int, float], under: Mapping[int, float]) -> tuple[float, float, float] | None:
    """How many times one takes as long as the other, with a 95 % interval that an odd process does not widen much.

    Student's t of the trimmed mean over replicates; None with fewer than two.
    """
    both = sorted(over.keys() & under.keys())
    if len(both) < 2:
        return None
    found = trimmed(log_times([[over[x] / under[x] for x in both]]))
    mean = float(found.mean[0])
    half = t_quantile(float(found.df[0])) * math.sqrt(float(found.variance[0]) / len(both))
    return exponential(mean), exponential(mean - half), exponential(mean + half)


def _five_percent(journal: Journal) -> Check:
    return share_slower(journal, "5 % slower", "slower")


def share_slower(journal: Journal, name: str, slower: str) -> Check:
    """Whether what is slower by 5 % than "honest" is seen to be."""
    sides = _times(journal, slower), _times(journal, "honest")
    found = _ratio(*sides)
    if found is None:
        return Check(name, "missed", f"honest and {slower} were not both measured")
    mean, low, high = (x - 1 for x in found)
    seen = f"measured {signed(mean)}, 95 % interval {signed(low)} to {signed(min(high, 10))}"
    if high < SLOWDOWN * 0.5 or low > SLOWDOWN * 1.5:
        if any(max(x.values()) > APART * min(x.values()) for x in sides):
            return Check(name, "unsure", f"{seen}, and processes {APART:g} × apart: this machine is too noisy")
        if (high - low) / 2 > SLOWDOWN:
            return Check(name, "unsure", f"{seen}, wider than what it is to tell: this machine is too noisy")
        return Check(name, "missed", f"{seen}: not 5 %, so the timer is wrong")
    if low <= 0:
        return Check(name, "unsure", f"{seen}: this machine is too noisy to see 5 %")
    return Check(name, "caught", seen)


def _resolved(journal: Journal) -> bool:
    return "unsure" not in {_five_percent(journal).verdict, _warm(journal).verdict}


def judge(journal: Journal) -> Iterator[Check]:
    """What a journal of planted faults shows."""
    yield _five_percent(journal)
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
    if by_name.keys() & OUTCOMES.keys():
        yield from _dishonest(journal, by_name)
    yield _warm(journal)


def _dishonest(journal: Journal, by_name: Mapping[str, Row]) -> Iterator[Check]:
    """What became of implementations that are quick where they are timed and right where they are checked."""
    for name, outcome in OUTCOMES.items():
        if name in NEED_GPU and journal.header.device == "cpu":
            continue
        what, row = f"dishonest: {name.replace('_', ' ')}", by_name.get(name)
        if row is None:
            yield Check(what, "missed", "no row")
        elif row.status == "timeout":
            yield Check(what, "unsure", f"{row.status}: {row.reason}")
        elif outcome == "incorrect" or row.status == "incorrect":  # the others too, where a GPU makes more of it
            seen = f"{row.status}: {row.reason}" if row.reason else row.status
            yield Check(what, "caught" if row.status == "incorrect" else "missed", seen)
        elif outcome == "remarked":
            said = [
                y
                for x in journal.records
                if x.implementation == name and x.measurement is not None
                for y in x.measurement.remarks
            ]
            yield Check(what, "caught" if said else "missed", f"{len(said)} changes put back")
        else:
            yield _no_gain(what, journal, name)


def _no_gain(what: str, journal: Journal, name: str) -> Check:
    """A memory that the harness makes useless: its time is that of the work.

    Of the work the quickest sample counts, as what else runs on the machine only ever adds to a time. Of the
    memory its median does, which is what a row says: a call that it knows by chance gains nothing.
    """
    honest, found = (_cold(journal, x) for x in ("honest", name))
    if not honest or not found:
        return Check(what, "missed", "not measured beside honest")
    quickest = min(honest)
    ratio = median(found) / quickest
    seen = f"{ratio:.2f} times as long as the work"
    if ratio > GAIN:
        return Check(what, "caught", seen)
    odd = max(_times(journal, "honest").values()) / quickest
    if odd > 1 / GAIN:
        return Check(what, "unsure", f"{seen}, and the work now and then {odd:.1f} times as long as itself")
    return Check(what, "missed", seen)


def _cold(journal: Journal, name: str) -> list[float]:
    """The samples of an implementation in cold rows."""
    return [y for x in journal.records if x.implementation == name and x.cache == "cold" for y in x.primary or ()]


def _warm(journal: Journal) -> Check:
    """A kernel that is only quick when its input is cached must not look quick in a cold row."""
    name = "lives off a warm cache"
    found = _ratio(_times(journal, "squares", "cold"), _times(journal, "squares", "hot"))
    if found is None:
        return Check(name, "missed", "not measured both cold and hot")
    mean, low, high = found
    up = f"to {high:.2f}" if high < 1000 else "upward"  # of two noisy processes it has no end worth a number
    seen = f"{mean:.2f} times as fast hot as cold, 95 % interval {low:.2f} {up}"
    if mean >= REUSE and low > 1:
        return Check(name, "caught", seen)
    if high < 1 / REUSE:  # a flush that does nothing leaves both alike
        return Check(name, "unsure", f"{seen}: this machine did something else while the hot one was measured")
    if high < REUSE:
        return Check(name, "missed", f"{seen}: the flush does not empty this cache")
    return Check(name, "unsure", f"{seen}: this machine is too noisy to see {REUSE:g}")
