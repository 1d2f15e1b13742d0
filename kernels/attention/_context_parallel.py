"""Attention of one sequence over several GPUs: how it is cut, and two ways to bring queries and keys together.

The sequence has 2·P chunks for P ranks. Rank r holds chunks r and 2·P - 1 - r ("zigzag"): under a causal mask the
early chunk sees few keys and the late one many, and every rank computes the same number of scores.

* `gathered`: all ranks' K and V, and one attention call for each of the two chunks over the keys up to its end. No
  merges, full-size tiles; (n-1)/n of K and V in memory beside a rank's own. Where copy engines bring them
  (`_pulled`), most come while the early chunk is attended to.
* `ring`: K and V go round, a pair of chunks a step, and outputs over parts of the keys are merged by their
  log-sum-exp. Two pairs of chunks in memory, whatever the number of GPUs; the backward pass goes round once more
  and computes each part's forward again.

Both are given what attends: `attend(q, k, v, mask)`, or `attend_lse` which gives the natural log-sum-exp too, both
differentiable, the last query and the last key being in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], torch.Tensor]
AttendLse = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], tuple[torch.Tensor, torch.Tensor]]


def chunks_of(rank: int, world: int) -> tuple[int, int]:
    """The numbers of a rank's two chunks."""
    return rank, 2 * world - 1 - rank


class Arriving(Protocol):
    """All ranks' K and V on their way."""

    def start(self, own: torch.Tensor, mask: str) -> torch.Tensor:
        """Of own (…, 2·L, D), this rank's chunks, memory for all of them, (…, 2·P·L, D), which will hold what a
        call of this mask reads.
        """
        ...

    def wait(self, chunks: int) -> None:
        """What is queued from here on finds so many first chunks there."""
        ...

    def end(self) -> None:
        """All has been waited for."""
        ...


class AtOnce:
    """By one collective of the default process group."""

    def start(self, own: torch.Tensor, mask: str) -> torch.Tensor:
        world = dist.get_world_size()
        flat = own.new_empty((world * own.shape[0], *own.shape[1:]))
        dist.all_gather_into_tensor(flat, own)
        halves = [x.chunk(2, -2) for x in flat.chunk(world)]
        return torch.cat([x[0] for x in halves] + [x[1] for x in reversed(halves)], -2)

    def wait(self, chunks: int) -> None:
        """They are there."""

    def end(self) -> None:
        """Nothing is left."""


def gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, attend: Attend, arriving: Arriving | None = None
) -> torch.Tensor:
    """Attention of this rank's q (B, H, 2·L, D) to all ranks' k and v (B, Hkv, 2·L, D): like q.

    Raises ValueError for an odd length.
    """
    length = _chunk(q)
    arriving = arriving or AtOnce()
    keys, values = _Gather.apply(torch.stack((k, v)), mask, arriving)
    rank, world = dist.get_rank(), dist.get_world_size()
    if mask == "full":
        arriving.wait(2 * world)
        out = attend(q, keys, values, mask)
    else:
        parts = []
        for own, number in zip(q.split(length, 2), chunks_of(rank, world), strict=True):
            end = (number + 1) * length
            arriving.wait(number + 1)
            parts.append(attend(own, keys[:, :, :end], values[:, :, :end], mask))
        out = torch.cat(parts, 2)
    arriving.end()
    return out


def _chunk(q: torch.Tensor) -> int:
    if q.shape[2] % 2:
        raise ValueError(f"q has {q.shape[2]} rows, expected two chunks of the same length")
    return q.shape[2] // 2


class _Gather(torch.autograd.Function):
    """All ranks' pairs of chunks, in the order of the sequence; backward, their gradients' sums."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, mask: str, arriving: Arriving) -> torch.Tensor:
        """own (…, 2·L, D) to (…, 2·P·L, D), as far as a call of this mask reads it."""
        return arriving.start(own.contiguous(), mask)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        world = dist.get_world_size()
        pieces = grad.chunk(2 * world, -2)
        by_rank = [torch.cat([pieces[c] for c in chunks_of(rank, world)], -2) for rank in range(world)]
        out = torch.empty_like(by_rank[0])
        dist.reduce_scatter_tensor(out, torch.cat(by_rank))
        return out, None, None


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, attend_lse: AttendLse) -> torch.Tensor:
    """As `gathered`, with K and V going round. Raises ValueError for an odd length."""
    _chunk(q)
    out: torch.Tensor = _Ring.apply(q, k, v, mask, attend_lse)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, attend_lse: AttendLse
    ) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        level = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        travelling = torch.stack((k, v))
        for step in range(dist.get_world_size()):
            arriving = _send_on(travelling) if step + 1 < dist.get_world_size() else None
            for rows, keys, part in _visible(step, q.shape[2] // 2, mask):
                own, (k_, v_) = q[:, :, rows], travelling[:, :, :, keys]
                merge(out[:, :, rows], level[:, :, rows], *attend_lse(own, k_, v_, part))
            if arriving is not None:
                travelling = arriving()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, level)
        ctx.given = mask, attend_lse
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Of O = Σ w·o with w = exp(lse - LSE): do = w·dO, dlse = w·dO·(o - O)."""
        q, k, v, result, level = ctx.saved_tensors
        mask, attend_lse = ctx.given
        wide = grad.float()
        delta = (wide * result.float()).sum(-1)
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        travelling = torch.stack((k, v))
        owed = torch.zeros(travelling.shape, dtype=torch.float32, device=q.device)
        for step in range(dist.get_world_size()):
            arriving = _send_on(travelling) if step + 1 < dist.get_world_size() else None
            for rows, keys, part in _visible(step, q.shape[2] // 2, mask):
                given = [x.detach().requires_grad_() for x in (q[:, :, rows], *travelling[:, :, :, keys])]
                with torch.enable_grad():
                    o, lse = attend_lse(*given, part)
                weight = (lse.detach() - level[:, :, rows]).exp()
                do = weight[..., None] * wide[:, :, rows]
                dlse = weight * (wide[:, :, rows] * o.detach().float()).sum(-1) - weight * delta[:, :, rows]
                found = torch.autograd.grad((o, lse), given, (do.to(o.dtype), dlse.to(lse.dtype)))
                dq[:, :, rows] += found[0]
                owed[0][:, :, keys] += found[1]
                owed[1][:, :, keys] += found[2]
            # Gradients go round with their keys and come home with the last step.
            owed = _send_on(owed)()
            if arriving is not None:
                travelling = arriving()
        return dq.to(q.dtype), owed[0].to(k.dtype), owed[1].to(v.dtype), None, None


def _send_on(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Sends to the next rank; what is given waits for what the one before sends."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return lambda: tensor
    tensor = tensor.contiguous()
    arriving = torch.empty_like(tensor)
    both = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % world),
        dist.P2POp(dist.irecv, arriving, (rank - 1) % world),
    ]
    works = dist.batch_isend_irecv(both)

    def wait() -> torch.Tensor:
        for x in works:
            x.wait()
        return arriving

    return wait


def _visible(step: int, length: int, mask: str) -> list[tuple[slice, slice, str]]:
    """Rows of q, keys of the pair that arrived with a step, and the mask between them, where any is visible."""
    rank, world = dist.get_rank(), dist.get_world_size()
    source = (rank - step) % world
    whole = slice(0, 2 * length)
    if mask == "full":
        return [(whole, whole, "full")]
    first, second = slice(0, length), slice(length, 2 * length)
    if source == rank:  # each chunk its own, and the late one the early one: aligned at the end, that is causal
        return [(first, first, "causal"), (second, first, "full"), (second, second, "causal")]
    # Of an earlier rank the early chunk comes before both of ours; of a later one, both come before our late one.
    return [(whole, first, "full")] if source < rank else [(second, whole, "full")]


def merge(out: torch.Tensor, level: torch.Tensor, part: torch.Tensor, lse: torch.Tensor) -> None:
    """Adds attention over further keys to `out` and its log-sum-exp `level`, both fp32, in place."""
    together = torch.logaddexp(level, lse.float())
    out.mul_((level - together).exp().nan_to_num_(0.0)[..., None])
    out.add_(part.float() * (lse.float() - together).exp()[..., None])
    level.copy_(together)
