"""`torch.distributed` as everybody uses it: NCCL between GPUs (multicast off), gloo between processes of a CPU.

Every call goes through the default process group, which the harness has made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REQUIRES = ("torch",)


def _all_reduce(case: Any) -> Callable[..., Any]:
    import torch.distributed as dist

    def out_of_place(x: Any, place: str) -> Any:
        result = x.clone()  # NCCL's own call has an output apart; torch's is in place
        dist.all_reduce(result)
        return result

    def in_place(x: Any, place: str) -> Any:
        if x.is_cuda:
            dist.all_reduce(x, dist.ReduceOp.AVG)
            return x
        dist.all_reduce(x)  # gloo has no mean
        return x.div_(case.world)

    return out_of_place if case.options["place"] == "out" else in_place


def _all_gather(case: Any) -> Callable[..., Any]:
    import torch.distributed as dist

    def call(x: Any, place: str = "out") -> Any:
        if place == "in":
            dist.all_gather_into_tensor(x, x.view(case.world, -1)[dist.get_rank()])
            return x
        result = x.new_empty(x.numel() * case.world)
        dist.all_gather_into_tensor(result, x)
        return result

    return call


def _reduce_scatter(case: Any) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist

    def call(x: Any, place: str = "out") -> Any:
        own = x.view(case.world, -1)[dist.get_rank()]
        result = torch.empty_like(own) if place == "out" else own
        dist.reduce_scatter_tensor(result, x)
        return result

    return call


def _all_to_all(case: Any) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist

    def call(x: Any) -> Any:
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x)
        return result

    return call


def _peer_copy(case: Any) -> Callable[..., Any]:
    """By sends and receives, which NCCL makes of stores by multiprocessors."""
    import torch.distributed as dist

    world = case.world

    def sources(rank: int, pattern: str) -> list[int]:
        if pattern == "all":
            return [(rank + step) % world for step in range(1, world)]
        return [(rank + 1) % world] if pattern == "ring" or rank == 0 else []

    def call(x: Any, pattern: str) -> Any:
        rank = dist.get_rank()
        own = sources(rank, pattern)
        alone = world == 1 or not own
        result = x.clone()[None] if alone else x.new_empty((len(own), x.numel()))
        sends = [dist.P2POp(dist.isend, x, r) for r in range(world) if r != rank and rank in sources(r, pattern)]
        receives = [dist.P2POp(dist.irecv, result[i], peer) for i, peer in enumerate(own) if peer != rank]
        for work in dist.batch_isend_irecv([*sends, *receives]) if sends or receives else ():
            work.wait()
        return result

    return call


def _all_gather_matmul(case: Any) -> Callable[..., Any]:
    """One after the other."""
    import torch
    import torch.distributed as dist

    def call(a: Any, w: Any) -> Any:
        whole = a.new_empty(case.world * a.shape[0], a.shape[1])
        dist.all_gather_into_tensor(whole, a)
        return torch.mm(whole, w)

    return call


def _matmul_reduce_scatter(case: Any) -> Callable[..., Any]:
    """One after the other."""
    import torch
    import torch.distributed as dist

    def call(a: Any, w: Any) -> Any:
        own = a.new_empty(a.shape[0] // case.world, w.shape[1])
        dist.reduce_scatter_tensor(own, torch.mm(a, w))
        return own

    return call


def _expert_exchange(case: Any) -> Callable[..., Any]:
    """An all-to-all with splits there and one back. The host waits for the splits, as it does in such code."""
    import torch
    import torch.distributed as dist

    world, E = case.world, case.axes["E"]

    def exchanged(rows: Any, given: Any, taken: Any) -> Any:
        result = rows.new_empty(sum(taken), *rows.shape[1:])
        dist.all_to_all_single(result, rows, taken, given)
        return result

    def call(x: Any, experts: Any, weights: Any, scale: Any) -> Any:
        K = experts.shape[1]
        order = experts.flatten().argsort(stable=True)  # copies of tokens by expert, so by rank too
        counts = torch.bincount(experts.flatten(), minlength=E)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)  # how many of each of our experts every rank sends
        given, taken = (n.view(world, -1).sum(1).tolist() for n in (counts, theirs))
        rows = exchanged(x[order // K], given, taken)
        own = torch.arange(E // world, device=x.device).repeat(world)
        rows *= scale[own.repeat_interleave(theirs, output_size=len(rows))]
        back = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        back[order] = exchanged(rows, taken, given)
        return torch.einsum("mkd,mk->md", back.view(-1, K, x.shape[1]).float(), weights).to(x.dtype)

    return call


IMPLEMENTATIONS = {
    "peer_copy": {"torch_distributed": _peer_copy},
    "all_reduce": {"torch_distributed": _all_reduce},
    "all_gather": {"torch_distributed": _all_gather},
    "reduce_scatter": {"torch_distributed": _reduce_scatter},
    "all_to_all": {"torch_distributed": _all_to_all},
    "all_gather_matmul": {"torch_distributed": _all_gather_matmul},
    "matmul_reduce_scatter": {"torch_distributed": _matmul_reduce_scatter},
    "expert_exchange": {"torch_distributed": _expert_exchange},
}
