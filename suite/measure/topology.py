"""What lies between the GPUs of a run, and what carries messages over it: conditions of cases on several GPUs."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from ...registry.store.record import Scalar
from .telemetry import Nvml

LINKS = 18
"""NVLinks that a GPU has at most."""


def ranks_facts(device: str, world: int) -> dict[str, Scalar]:
    """Conditions of a run whose largest case takes `world` GPUs."""
    if device == "cpu":
        return {"world": world, "ranks": "gloo"}
    import torch

    version = getattr(torch.cuda.nccl, "version", lambda: ())()
    return {
        "world": world,
        "ranks": "nccl",
        "nccl": ".".join(map(str, version)),
        "symmetric_memory": _symmetric_memory(),
        "topology": topology(world),
    }


def _symmetric_memory() -> str | None:
    """The backend of torch's symmetric memory; None where torch does not say."""
    try:
        from torch.distributed import _symmetric_memory as memory

        backend: Any = memory.get_backend("cuda")  # type: ignore[arg-type]  # takes a name as well
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return None
    return None if backend is None else str(backend)


def topology(world: int) -> str | None:
    """How the first GPUs are linked, pair by pair where pairs differ: `NV18` for 18 NVLinks, else by what is
    between them. None where NVML does not say, or where fewer than two are visible.
    """
    import torch

    world = min(world, torch.cuda.device_count())
    if world < 2:
        return None
    handles = [Nvml.open(str(torch.cuda.get_device_properties(i).uuid)) for i in range(world)]
    known = [x for x in handles if x is not None]
    if len(known) < world:
        return None
    pairs = {(a, b): _link(known[a], known[b]) for a, b in combinations(range(world), 2)}
    kinds = set(pairs.values())
    return kinds.pop() if len(kinds) == 1 else ", ".join(f"{a}-{b} {x}" for (a, b), x in pairs.items())


ANCESTORS = {0: "internal", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's nvmlGpuTopologyLevel_t, by the names that nvidia-smi gives them."""


def _link(one: Nvml, other: Nvml) -> str:
    """What is between two GPUs. Through a switch all active links of a GPU lead to every other."""
    active = [sum(bool(x.get("NvLinkState", i)) for i in range(LINKS)) for x in (one, other)]
    if min(active):
        return f"NV{min(active)}"
    return ANCESTORS.get(one.get("TopologyCommonAncestor", other.handle), "unknown")
