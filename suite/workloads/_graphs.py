"""CUDA graphs of what a program calls again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def captured(
    device: torch.device, *calls: Callable[[], Any], forget: Callable[[], None] | None = None
) -> list[tuple[Any, Any]]:
    """A CUDA graph of each call on a device, and what it leaves its result in.

    Replayed in this order, or a part of it, they share one pool of memory. Tensors that a call makes, and that
    somebody holds, stay where they are.

    Libraries choose and allocate at their first calls, which no graph can hold: these come before, on a stream of
    their own; `forget` gives up what they left, whose memory the graphs then have.

    Raises NotImplementedError on a device that has no such graphs, and for a call that none can hold: one that
    waits for the device, say.
    """
    import torch

    from ..measure.device import recover, refusal

    if device.type != "cuda":
        raise NotImplementedError("CUDA graphs are of CUDA devices")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    if forget is not None:
        forget()
    found: list[tuple[Any, Any]] = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=found[0][0].pool() if found else None, stream=side):
                result = call()
        except RuntimeError as error:
            recover(side)
            own = refusal(error)
            if isinstance(own, torch.OutOfMemoryError):
                raise own from None
            raise NotImplementedError(f"a CUDA graph cannot hold it: {str(own).splitlines()[0]}") from None
        found.append((graph, result))
    return found
