"""Where the time of one row goes: its kernels, what of them is ours, and when the device waited.

The row is run again in a process of its own under PyTorch's profiler (`profiler.py`); what is read here is the
Chrome trace that it wrote. Pure, but for `names`, which reads the kernels' files.
"""

from __future__ import annotations

import ast
import csv
import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...registry import escape
from ...registry.store.record import Case, KernelKind, Launched, Launches

DEVICE = {"kernel": None, "gpu_memcpy": "copy", "gpu_memset": "copy"}
"""Categories of a trace's events that take a device's time, and the kind that they are."""
PRODUCT = re.compile(
    r"gemm|cutlass|cublas|nvjet|xmma|wgmma|aten::(add|b|badd)?mm\b|convolution|mkldnn"
    r"|^triton_(tem_fused.*_)?(add|b|badd)?mm(_|$)",
    re.I,
)
NO_PRODUCT = re.compile(r"^triton_(poi|red|per)_|attention|flash|fmha|sdpa", re.I)
"""What is named after a product and is none: what Inductor fused around one, and attention, which has two."""
COPY = re.compile(
    r"aten::(copy_|_to_copy|contiguous|clone)\b|^Mem(cpy|set)|copy_kernel(_cuda)?\b"
    r"|^triton_poi_fused(_(_to_copy|copy_|clone|view|_unsafe_view|t|transpose|permute))+(_\d+)?$",
    re.I,
)
NAMELESS = "Kernel"
"""What the profiler calls a function of the name `kernel`."""
LONGEST = 200
"""Characters of a kernel's name that a journal keeps: templates of C++ have thousands."""
MOST = 1000
"""Kernels of a step that a journal keeps, the longest."""
STEP = "kernelmark step"
"""The name under which a step stands in the trace."""


class Kernel(msgspec.Struct, frozen=True):
    """All calls of one kernel (on a CPU: of one operator of PyTorch, without what it calls) in one step."""

    name: str
    kind: KernelKind
    calls: float
    ms: float
    share: float
    """Of the step."""


class Profile(msgspec.Struct, frozen=True):
    """One step, the mean over those profiled. `gap_ms` is when none of its kernels ran."""

    steps: int
    step_ms: float
    gap_ms: float
    kernels: tuple[Kernel, ...]
    """The longest first."""

    def ms(self, kind: KernelKind) -> float:
        """The time of one kind of kernels."""
        return sum(x.ms for x in self.kernels if x.kind == kind)


def names(folders: Iterable[Path]) -> frozenset[str]:
    """The names of the compiled functions in kernels' files; one that cannot be read has none."""
    found = set()
    for folder in folders:
        for path in folder.rglob("*.py"):
            try:
                tree = ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError):  # somebody's file, of another row than this
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(x) for x in node.decorator_list):
                    found.add(node.name)
    return frozenset(found)


def summarized(trace: Mapping[str, Any], steps: int, ours: Collection[str], device: str) -> Profile:
    """A Chrome trace of so many steps. Raises `ValueError` where it has none of the steps."""
    events = [x for x in trace["traceEvents"] if x.get("ph") == "X"]
    marks = [x for x in events if x.get("name") == STEP and x.get("cat") == "user_annotation"]
    if not marks:
        raise ValueError("the trace has no steps")
    if device == "cpu":
        spans = [(x["ts"], x["dur"]) for x in marks]
        thread = marks[0]["tid"]
        inside = [x for x in events if x.get("cat") == "cpu_op" and x["tid"] == thread and _within(x, spans)]
        own = _own(inside)
        wall = sum(dur for _, dur in spans)
        busy = sum(own)
    else:
        inside = [x for x in events if x.get("cat") in DEVICE]
        own = [x["dur"] for x in inside]
        begin, end = min(x["ts"] for x in marks), max((x["ts"] + x["dur"] for x in (*marks, *inside)), default=0)
        wall, busy = end - begin, _covered((x["ts"], x["dur"]) for x in inside)
    calls: dict[tuple[str, KernelKind], list[float]] = {}
    for event, us in zip(inside, own, strict=True):
        kind = _kind(event["name"], event["cat"], ours)
        calls.setdefault((event["name"], kind), []).append(us)
    kernels = [
        Kernel(name, kind, len(us) / steps, sum(us) / steps / 1e3, sum(us) / wall if wall else 0.0)
        for (name, kind), us in calls.items()
    ]
    return Profile(
        steps,
        wall / steps / 1e3,
        max(0.0, wall - busy) / steps / 1e3,
        tuple(sorted(kernels, key=lambda x: (-x.ms, x.name))),
    )


def launches(found: Profile, case: Case, implementation: str) -> Launches:
    """A profile as a journal's line."""
    kernels = tuple(Launched(escape.plain(x.name)[:LONGEST], x.kind, x.calls, x.ms) for x in found.kernels[:MOST])
    return Launches(case.operator, case.name, implementation, found.steps, found.gap_ms, kernels)


def _kind(name: str, category: str, ours: Collection[str]) -> KernelKind:
    if DEVICE.get(category) == "copy" or COPY.search(name):
        return "copy"
    if name in ours or name.startswith("kernelmark::") or (name == NAMELESS and NAMELESS.lower() in ours):
        return "ours"
    return "product" if PRODUCT.search(name) and not NO_PRODUCT.search(name) else "other"


def _within(event: Mapping[str, Any], spans: Sequence[tuple[float, float]]) -> bool:
    return any(begin <= event["ts"] < begin + dur for begin, dur in spans)


def _own(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Each event's time without that of the events inside it, which are of one thread and so lie within."""
    own = [float(x["dur"]) for x in events]
    stack: list[int] = []
    for i in sorted(range(len(events)), key=lambda i: (events[i]["ts"], -events[i]["dur"])):
        while stack and events[stack[-1]]["ts"] + events[stack[-1]]["dur"] <= events[i]["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= events[i]["dur"]
        stack.append(i)
    return [max(0.0, x) for x in own]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts: kernels on several streams overlap."""
    total, until = 0.0, float("-inf")
    for begin, dur in sorted(spans):
        total += max(0.0, begin + dur - max(begin, until))
        until = max(until, begin + dur)
    return total


class Light(msgspec.Struct, frozen=True):
    """How far one launch of a kernel is from the device's limits, as Nsight Compute says.

    Throughputs are percentages of the peak rates, of memory that of its busiest part. Occupancy is the share of a
    multiprocessor's warps that were at work; waves say how often the grid fills the device. `None` was not said.
    """

    kernel: str
    us: float | None = None
    compute: float | None = None
    memory: float | None = None
    dram: float | None = None
    l2: float | None = None
    occupancy: float | None = None
    registers: float | None = None
    waves: float | None = None


SAID = {
    ("Duration", "ns"): ("us", 1e-3),
    ("Duration", "us"): ("us", 1.0),
    ("Duration", "ms"): ("us", 1e3),
    ("Compute (SM) Throughput", "%"): ("compute", 1.0),
    ("Memory Throughput", "%"): ("memory", 1.0),
    ("DRAM Throughput", "%"): ("dram", 1.0),
    ("L2 Cache Throughput", "%"): ("l2", 1.0),
    ("Achieved Occupancy", "%"): ("occupancy", 1.0),
    ("Registers Per Thread", "register/thread"): ("registers", 1.0),
    ("Waves Per SM", ""): ("waves", 1.0),
}
"""Names and units of Nsight Compute's sections SpeedOfLight, Occupancy and LaunchStats."""


def speed_of_light(text: str) -> tuple[Light, ...]:
    """Nsight Compute's CSV, launch by launch."""
    start = text.find('"ID"')
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO(text[start:] if start >= 0 else "")):
        said = SAID.get((row.get("Metric Name") or "", row.get("Metric Unit") or ""))
        if said is not None and (value := row.get("Metric Value")):
            name, scale = said
            found.setdefault((row["ID"], row["Kernel Name"]), {})[name] = scale * float(value.replace(",", ""))
    return tuple(Light(kernel, **x) for (_, kernel), x in found.items())


def over_launches(lights: Iterable[Light]) -> dict[str, Light]:
    """By kernel: its launches' mean time, and the mean of all else, each launch by its time."""
    launches: dict[str, list[Light]] = {}
    for x in lights:
        launches.setdefault(x.kernel, []).append(x)

    def mean(of: Sequence[Light], name: str) -> float | None:
        said = [
            (getattr(x, name), 1.0 if name == "us" else x.us or 1.0) for x in of if getattr(x, name) is not None
        ]
        return sum(value * weight for value, weight in said) / sum(y for _, y in said) if said else None

    names = [x for x in Light.__struct_fields__ if x != "kernel"]
    return {kernel: Light(kernel, **{x: mean(of, x) for x in names}) for kernel, of in launches.items()}
