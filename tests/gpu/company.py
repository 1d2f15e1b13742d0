"""Launches beside launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def disturbed(call: Callable[[], Sequence[torch.Tensor]]) -> int:
    """How many outputs were others than those of a call alone: of 20 calls on each of two streams at once, and of
    a graph replayed as often on a third.
    """
    alone = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []
    for _ in range(20):
        for each in captured:
            each.fill_(7)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[2]):
            graph.replay()
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                found += call()
        torch.cuda.synchronize()
        found += [x.clone() for x in captured]
    return sum(not torch.equal(x, alone[i % len(alone)]) for i, x in enumerate(found))
