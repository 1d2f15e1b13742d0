"""All-reduce among GPUs of one host over peer pointers: one-shot, two-shot, and NCCL for what is large.

* One-shot, for latency: every rank puts its array where all can read it, and every rank adds up all of them. One
  meeting; (n-1)·S bytes come in over the links.
* Two-shot, for middle sizes: rank r adds up the r-th chunk of all arrays and writes the sum to every rank. Two
  meetings; 2·S·(n-1)/n bytes, as a ring has, in two steps and not 2(n-1).
* Above, links are full either way and NCCL's pipelining wins.

Run on two GPUs of one host; the logic is tested with Triton's interpreter in several processes on shared memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, cdiv, check, choice
from ._symmetric import PHASES, Symmetric, base, begin, meet, shares, symmetric

ONE_SHOT_BYTES = 256 << 10
"""Up to here one-shot, of four GPUs; more of fewer, as each byte comes from fewer peers."""
TWO_SHOT_BYTES = 16 << 20
"""Up to here two-shot, beyond it NCCL."""
FEW, MANY = 8, 64
"""Programs of a launch up to and above `FEW_BYTES`: more of them share the links better and meet longer."""
FEW_BYTES = 32 << 10
BLOCK = 256 if INTERPRETED else 2048
"""Elements of a tile; 16 bytes a thread of four warps in 16 bits."""


def all_reduce(x: torch.Tensor, place: str = "out") -> torch.Tensor:
    """The sum of all ranks' `x`; with `place="in"` their mean, written over `x`, which is also given back.

    x in bf16, fp16 or fp32, contiguous, of the same shape in all ranks of the default process group; sums are
    fp32. Every rank must call it. Raises TypeError for a wrong type or dtype, ValueError for a wrong layout or
    place.
    """
    check("x", x, dtypes=FLOATING)
    choice("place", place, ("out", "in"))
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    out = x if place == "in" else torch.empty_like(x)
    group = dist.group.WORLD
    world = dist.get_world_size(group)
    size = x.numel() * x.element_size()
    if size > TWO_SHOT_BYTES or world == 1 or not x.numel():
        if place == "out":
            out.copy_(x)
        dist.all_reduce(out, dist.ReduceOp.AVG if place == "in" else dist.ReduceOp.SUM)
        return out
    shared = symmetric(group, x.device, FEW if size <= FEW_BYTES else MANY, size)
    return reduce(x, out, shared, 1.0 / world if place == "in" else 1.0)


shares(all_reduce)


def reduce(x: torch.Tensor, out: torch.Tensor, shared: Symmetric, scale: float) -> torch.Tensor:
    """`out` becomes scale · Σ x over the ranks of `shared`, by the algorithm for its size; `out` may be `x`."""
    size = x.numel() * x.element_size()
    kernel = _one_shot if size * shared.world <= 4 * ONE_SHOT_BYTES else _two_shot
    kernel[(shared.programs,)](
        x,
        out,
        shared.peers,
        x.numel(),
        cdiv(x.numel(), shared.world),
        scale,
        shared.data // x.element_size(),
        shared.capacity // x.element_size(),
        RANK=shared.rank,
        WORLD=shared.world,
        PHASES=PHASES,
        BLOCK=BLOCK,
    )
    return out


@triton.jit
def _one_shot(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    out,
    peers,
    N,
    chunk,
    scale,
    data,
    half,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PHASES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p takes tiles p, p + programs, … of the array, in every rank the same ones."""
    call = begin(peers, RANK)
    first = data + (call & 1) * half
    own = base(peers, RANK, x) + first
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, N, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(own + at, tl.load(x + at, at < N), at < N)
    meet(peers, call, 0, RANK, WORLD, PHASES)
    for start in range(tl.program_id(0) * BLOCK, N, step):
        at = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):  # in the same order in all ranks: they end with the same bits
            total += tl.load(base(peers, peer, x) + first + at, at < N, 0.0).to(tl.float32)
        tl.store(out + at, (total * scale).to(out.dtype.element_ty), at < N)


@triton.jit
def _two_shot(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    out,
    peers,
    N,
    chunk,
    scale,
    data,
    half,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PHASES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p takes the same tiles of every chunk, in every rank: only programs of one number wait for another.

    A rank's own chunk of the half is read by nobody but itself after the first meeting, so sums are written where
    the summands lay: to the RANK-th chunk of every rank's half, after this rank has read all of them there. A
    peer's RANK-th chunk is read by this rank alone.
    """
    call = begin(peers, RANK)
    first = data + (call & 1) * half
    own = base(peers, RANK, x) + first
    step = tl.num_programs(0) * BLOCK
    for part in tl.static_range(WORLD):
        end = tl.minimum((part + 1) * chunk, N)
        for start in range(part * chunk + tl.program_id(0) * BLOCK, end, step):
            at = start + tl.arange(0, BLOCK)
            tl.store(own + at, tl.load(x + at, at < end), at < end)
    meet(peers, call, 0, RANK, WORLD, PHASES)
    end = tl.minimum((RANK + 1) * chunk, N)
    for start in range(RANK * chunk + tl.program_id(0) * BLOCK, end, step):
        at = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):
            total += tl.load(base(peers, peer, x) + first + at, at < end, 0.0).to(tl.float32)
        mean = (total * scale).to(x.dtype.element_ty)
        for peer in tl.static_range(WORLD):
            tl.store(base(peers, peer, x) + first + at, mean, at < end)
    meet(peers, call, 1, RANK, WORLD, PHASES)
    for part in tl.static_range(WORLD):
        end = tl.minimum((part + 1) * chunk, N)
        for start in range(part * chunk + tl.program_id(0) * BLOCK, end, step):
            at = start + tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(own + at, at < end), at < end)
