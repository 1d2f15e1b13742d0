"""Copies from peers' memory by copy engines, straight from where a peer's array lies: what links and engines give.

A rank opens its peers' arrays once (CUDA IPC) and from then on copies, each peer on a stream of its own. Ranks
meet before, so that what they had queued has written the arrays, and at the end, so that no array is written while
others still read it. Whether an array lies where it was opened only its own rank knows. So processes agree on it
before each call, which a device at work does not wait for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._common import FLOATING, check, choice
from ._streams import stream
from ._symmetric import forget, symmetric, taken

_opened: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}


def peer_copy(x: torch.Tensor, pattern: str) -> torch.Tensor:
    """(n, N): the arrays (N,) of the n ranks that this one pulls from, in order; (1, N) with its own where n is 0.

    `pattern` "pair": rank 0 pulls from rank 1; "ring": each from the next; "all": each from all others. x in bf16,
    fp16 or fp32, contiguous; where a rank's lies elsewhere than in the call before, all are opened anew. Every
    rank must call it, and the default process group must take tensors of the CPU.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or pattern; the message names the
    argument.
    """
    check("x", x, dtypes=FLOATING, dim=1)
    choice("pattern", pattern, ("pair", "ring", "all"))
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = {
        "pair": [1 % world] if rank == 0 else [],
        "ring": [(rank + 1) % world],
        "all": [(rank + step) % world for step in range(1, world)],
    }[pattern]
    arrays = _arrays(x)
    handle = symmetric(dist.group.WORLD, x.device, 1, 1, halves=1).handle
    handle.barrier(channel=1)  # what peers had queued is done: their arrays are written
    if not peers:
        result = x.clone()[None]
    else:
        result = x.new_empty((len(peers), x.numel()))
        here = torch.cuda.current_stream(x.device)
        for i, peer in enumerate(peers):
            side = stream(x.device, i)
            side.wait_stream(here)
            with torch.cuda.stream(side):
                result[i].copy_(arrays[peer], non_blocking=True)
        for i in range(len(peers)):
            here.wait_stream(stream(x.device, i))
    handle.barrier(channel=0)
    return result


def _forget() -> None:
    """Gives up peers' arrays, and the memory by which ranks meet."""
    _opened.clear()
    forget()


peer_copy.shared, peer_copy.forget = taken, _forget  # type: ignore[attr-defined]  # what the harness asks for


def _arrays(x: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' arrays, opened at the first call with these."""
    key = x.data_ptr(), x.numel(), x.dtype  # a view in another dtype lies in the same place
    known = torch.tensor(int(key in _opened), dtype=torch.int32)
    dist.all_reduce(known, dist.ReduceOp.MIN)
    if known:
        return _opened[key]
    from torch.multiprocessing.reductions import reduce_tensor

    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, reduce_tensor(x.detach()))
    found = [x if i == dist.get_rank() else make(*given) for i, (make, given) in enumerate(said)]
    _opened.clear()  # of inputs that are gone
    _opened[key] = found
    return found
