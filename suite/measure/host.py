"""What of the host decides a CPU's times beside its processor: which cores and memory a process may use, and how.

Read in the worker that measures, since `taskset`, `numactl`, a container or a preloaded allocator can hold it to
other ones than its supervisor. What Linux does not say is left out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...registry.store.record import Scalar

PROCESS = Path("/proc/self")
SYSTEM = Path("/sys")
ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def facts() -> dict[str, Scalar]:
    """By name: `cores` and `memory_nodes` that it may use, `memory_policy` of their pages, `huge_pages`, the
    `allocator`, whether a core's two threads are on (`smt`), and the `vectors` that torch's own kernels use.
    """
    import torch

    found: dict[str, Scalar] = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_nodes": _status("Mems_allowed_list"),
        "memory_policy": _policy(),
        "huge_pages": _chosen(_text(SYSTEM / "kernel/mm/transparent_hugepage/enabled")),
        "allocator": _allocator(),
        "smt": {"0": False, "1": True}.get(_text(SYSTEM / "devices/system/cpu/smt/active").strip()),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
    return {name: value for name, value in found.items() if value is not None}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _status(name: str) -> str | None:
    found = re.search(rf"^{name}:\s*(\S+)", _text(PROCESS / "status"), re.MULTILINE)
    return found[1] if found else None


def _policy() -> str | None:
    """`default`, `bind:0`, `interleave:0-1`, …: of the heap's pages, which have the process's own."""
    lines = _text(PROCESS / "numa_maps").splitlines()
    of = [x.split() for x in lines]
    named = [x[1] for x in of if "heap" in x[2:]] or [x[1] for x in of if len(x) > 1]
    return named[0] if named else None


def _chosen(text: str) -> str | None:
    """`always [madvise] never` → madvise."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else None


def _allocator() -> str | None:
    maps = _text(PROCESS / "maps")
    if not maps:
        return None
    return next((x for x in ALLOCATORS if re.search(rf"/lib{x}[\w.-]*\.so", maps)), "libc")
