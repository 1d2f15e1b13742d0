"""FSDP2's all-gathers and reduce-scatters by implementations that a system's `parts` name.

A part that FSDP2 can use has `into`, an attribute of the operator's call (see `kernels/collective/_sharded.py`):
`all_gather.into(x, out, group)` and `reduce_scatter.into(x, out, group, mean)`, which queue their work so that
what the current stream does behind them sees it done. FSDP2 calls them in streams of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..system import Assembly

EXCHANGES = ("all_gather", "reduce_scatter")
"""Operators that a system may name for FSDP2, of weights and of gradients."""


def named(parts: Mapping[str, str]) -> list[str]:
    """Those that a system's parts name."""
    return [x for x in EXCHANGES if x in parts]


def calls(assembly: Assembly, world: int, dtype: str, device: str) -> dict[str, Callable[..., Any]]:
    """The calls that a system names, by operator. Raises NotImplementedError for one that FSDP2 cannot use."""
    found = {}
    for name in named(assembly.system.parts):
        chosen = assembly.implementation(name, name, device)
        case = assembly.catalog.operator(name).case({"N": world, "gpus": world}, dtype, "forward")
        call = chosen.load()(case)
        if not hasattr(call, "into"):
            raise NotImplementedError(f"FSDP2 has no use for {name} of {chosen.name}: it writes to no given array")
        found[name] = call
    return found


def take(part: Any, calls: Mapping[str, Callable[..., Any]]) -> None:
    """Has a module that is sharded exchange by these calls, and by FSDP2's own where there is none."""
    if call := calls.get("all_gather"):
        part.set_custom_all_gather(Gather(call.into))  # type: ignore[attr-defined]  # as `calls` has looked for
    if call := calls.get("reduce_scatter"):
        part.set_custom_reduce_scatter(Scatter(call.into))  # type: ignore[attr-defined]


def shared(calls: Mapping[str, Any]) -> int:
    """Bytes of this rank's memory that its peers can read for them; each says it of all that are of its kind."""
    return max((int(x.shared()) for x in calls.values() if hasattr(x, "shared")), default=0)


def forget(calls: Mapping[str, Any]) -> None:
    """Gives that memory up."""
    for x in calls.values():
        if hasattr(x, "forget"):
            x.forget()


class _Plain:
    """Of FSDP2's `Comm`: memory as its own has it, so that FSDP2 alone says how long it is needed."""

    def __init__(self, into: Callable[..., None]) -> None:
        self._into = into

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        import torch

        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Plain):
    """FSDP2's `AllGather`."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        """Nothing to wait for: FSDP2 records an event in the stream behind it."""
        self._into(input_tensor, output_tensor, group)


class Scatter(_Plain):
    """FSDP2's `ReduceScatter`."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        """As `Gather`. Sums that are scaled in another way than to the mean are the process group's."""
        import torch.distributed as dist

        if op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            self._into(input_tensor, output_tensor, group, op == dist.ReduceOp.AVG)
        else:
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
