"""What a rival is called where a ratio over it is read: NCCL has a switch that decides how fast it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..store.record import Scalar

NCCL = "torch_distributed"
"""PyTorch's collectives, which are NCCL's on GPUs."""
SWITCH = "env/NCCL_NVLS_ENABLE"
"""The condition that says whether NCCL may reduce within the switch of NVLink (multicast)."""
OFF = "NCCL, NVLS off"


def without_multicast(implementation: str | None, conditions: Mapping[str, Scalar]) -> bool:
    """Whether a rival is NCCL without what makes it faster where the hardware has it."""
    return implementation == NCCL and str(conditions.get(SWITCH)) == "0"


def told(implementation: str, conditions: Mapping[str, Scalar]) -> str:
    """A rival's name, with what must be known of a ratio over it."""
    return f"{implementation} ({OFF})" if without_multicast(implementation, conditions) else implementation


def warning(rivals: Iterable[str | None], conditions: Mapping[str, Scalar]) -> str:
    """The same in a sentence for a run whose best others are these; empty where none is NCCL."""
    if not any(without_multicast(x, conditions) for x in rivals):
        return ""
    return (
        f"× {OFF}: what is over {NCCL} is over NCCL without multicast in NVLink's switch, which it has by default."
    )
