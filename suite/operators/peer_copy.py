"""Copies between GPUs by their copy engines: the ceiling of whatever sends data from one to another.

Each rank pulls from its peers' memory; `pair`: rank 0 from rank 1 alone; `ring`: each from the next; `all`: each
from every other one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.metric import Metric
from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Sharding, torch_dtype
from ._collective import EXACT, row, rows

if TYPE_CHECKING:
    import torch

RATE = Metric(
    "link_rate",
    "GB/s",
    better="higher",
    shown="table",
    about="Bytes that one GPU receives over the time of a call.",
)


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (world, N), a row a rank, and which peers are pulled from."""
    import torch

    shape = (case.world, case.axes["N"])
    return {
        "x": torch.randn(shape, device=device, generator=generator, dtype=torch_dtype(case.dtype)),
        "pattern": case.options["pattern"],
    }


def sources(pattern: str, rank: int, world: int) -> list[int]:
    """The ranks that a rank pulls from, in order."""
    if pattern == "pair":
        return [1 % world] if rank == 0 else []
    if pattern == "ring":
        return [(rank + 1) % world]
    return [(rank + step) % world for step in range(1, world)]


def reference(x: torch.Tensor, pattern: str) -> torch.Tensor:
    """(world, n, N): what each rank pulls; where it pulls nothing, its own array."""
    import torch

    world = x.shape[0]
    return torch.stack([x[sources(pattern, rank, world) or [rank]] for rank in range(world)])


def received(case: Case) -> int:
    """Bytes that a GPU receives."""
    peers = case.world - 1 if case.options["pattern"] == "all" else 1
    return peers * case.axes["N"] * BYTES[case.dtype]


OPERATOR = Operator(
    name="peer_copy",
    summary="Copies from other GPUs' memory: one pair, round a ring, all pairs",
    axes={"N": "elements of an array"},
    options={"pattern": ("pair", "ring", "all")},
    inputs=inputs,
    reference=reference,
    bytes=lambda case: 2 * received(case),
    flops=lambda case: 0,
    tolerances=EXACT,
    rates={RATE: lambda case, milliseconds: received(case) / milliseconds / 1e6},
    sharding=Sharding(split=row, join=rows),
    plans={},
)
