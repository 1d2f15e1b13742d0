"""Shards of weights gathered and gradients scattered by copy engines, beside what a training step computes.

NCCL's kernels hold multiprocessors as long as a link is busy, and a product that has a program for each of them
ends when the last one has found a place. Here copies between peers hold none. What is computed is a meeting, of
one warp, and the sum of what came, which runs as long as memory takes.

Each exchange has memory and a stream of its own, so that a layer's gradients and the next one's weights are under
way at once. Calls of one exchange follow one another in that stream, whichever stream they are called from.

A rank's memory is two places, which calls take in turn, with one meeting a call and none at its end. A place is
used again in the call after the next. Before that call a rank has passed the meeting of the one between, to which
each peer came, in its stream, behind all that it did in the call before: it has read what was in that place. What
is larger than a place goes in pieces, each with a turn and a meeting of its own.

Turns are counted by the host, so no CUDA graph may hold a call: a capture raises RuntimeError. All groups of a
device share the streams: ranks must call in one order whatever they have in common.

Run on four GPUs of one host; the logic is tested in several processes on shared memory, the sum by Triton's
interpreter.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, cdiv, on
from ._peers import Peers

PLACES = 2
PIECE = 128 << 20
"""Bytes of a shard that go at once. A meeting may wait until a product leaves room for its warp: a layer of 8 B
parameters over four GPUs, 104 MiB a shard, has one.
"""
LINE = 128
"""Bytes, of which slots are whole multiples."""
GATHERING, SCATTERING = 11, 12
"""The streams."""
URGENT = -1
"""Their priority, that of FSDP2's own: a meeting that waits behind products would have all ranks wait."""
BLOCK = 512 if INTERPRETED else 4096
"""Elements that a program adds up."""


def gather_into(x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> None:
    """`out` (world · N,) becomes all ranks' `x` (N,) by rank; x may be its rank's share of out.

    Both contiguous and of one dtype, whichever it is, of the same length in all ranks. Every rank of the group
    must call it. By `torch.distributed` where ranks have no memory in common.
    """
    size = x.numel() * x.element_size()
    peers = _peers(x, group, size, 1, "shards gathered")
    if peers is None:
        dist.all_gather_into_tensor(out, x, group=group)
        return
    with peers.beside(GATHERING):
        gather(x, out, peers)
    peers.wait(GATHERING)


def scatter_into(x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, mean: bool = False) -> None:
    """`out` (N,) becomes the sum over ranks, or the mean, of this rank's share of `x` (world · N,), in fp32 and in
    the order of ranks, rounded once.

    Both contiguous and of one dtype, of the same length in all ranks. Every rank of the group must call it. By
    `torch.distributed`, with its rounding, where ranks have no memory in common, and of others than bf16, fp16 and
    fp32.
    """
    peers = None
    if x.dtype in FLOATING:
        size = out.numel() * out.element_size()
        peers = _peers(x, group, size, dist.get_world_size(group) - 1, "shards scattered")
    if peers is None:
        op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
        dist.reduce_scatter_tensor(out, x, op=op, group=group)
        return
    with peers.beside(SCATTERING):
        scatter(x, out, peers, 1 / peers.world if mean else 1.0)
    peers.wait(SCATTERING)


def _peers(x: torch.Tensor, group: dist.ProcessGroup, size: int, slots: int, use: str) -> Peers | None:
    """Of places with so many slots of `size` bytes at least, or of a piece; None where there is no such memory, or
    no need.
    """
    if not size or not slots:
        return None
    # By powers of two: what is outgrown stays, and all of it is less than what took its place.
    size = min(PIECE, 1 << (size - 1).bit_length())
    return Peers.if_any(group, x.device, PLACES * slots * cdiv(size, LINE) * LINE, use, URGENT)


def gather(x: torch.Tensor, out: torch.Tensor, peers: Peers) -> None:
    """As `gather_into`, over `peers`, in the current stream."""
    own, parts = x.view(torch.uint8), out.view(torch.uint8).view(peers.world, -1)
    slots = _slots(peers, 1)
    for first in range(0, own.numel(), slots[2]):
        piece = slice(first, min(first + slots[2], own.numel()))
        size, turn = piece.stop - first, peers.turn() % PLACES
        peers.place(peers.rank, slots, torch.uint8)[turn, 0, :size].copy_(own[piece])
        peers.meet(turn)
        for peer in peers.others():
            parts[peer, piece].copy_(peers.place(peer, slots, torch.uint8)[turn, 0, :size])
    if parts[peers.rank].data_ptr() != own.data_ptr():
        parts[peers.rank].copy_(own)


def scatter(x: torch.Tensor, out: torch.Tensor, peers: Peers, scale: float = 1.0) -> None:
    """As `scatter_into`, over `peers`, in the current stream, times `scale`. A rank has a slot for each peer."""
    world, rank, width = peers.world, peers.rank, x.element_size()
    parts, slots = x.view(world, -1), _slots(peers, world - 1)
    step = slots[2] // width
    for first in range(0, out.numel(), step):
        piece = slice(first, min(first + step, out.numel()))
        size, turn = piece.stop - first, peers.turn() % PLACES
        for peer in peers.others():
            slot = peers.place(peer, slots, torch.uint8)[turn, rank - (rank > peer), : size * width]
            slot.copy_(parts[peer, piece].view(torch.uint8))
        peers.meet(turn)
        came = peers.place(rank, slots, torch.uint8)[turn].view(x.dtype)
        add(parts[rank, piece], came, out[piece], rank, scale)


def _slots(peers: Peers, slots: int) -> tuple[int, int, int]:
    """A rank's memory as places, slots of each, and bytes of a slot: always the same for the same memory."""
    return PLACES, slots, peers.capacity // (PLACES * slots) // LINE * LINE


def add(own: torch.Tensor, came: torch.Tensor, out: torch.Tensor, rank: int, scale: float) -> None:
    """`out` (N,) becomes scale · (own (N,) + the first N of each row of `came` (world - 1, at least N)), in fp32
    and in the order of ranks, of which the rows have all but this one.
    """
    N = out.numel()
    with on(own):
        _added[(cdiv(N, BLOCK),)](
            own, came, out, N, came.stride(0), scale, RANK=rank, WORLD=came.shape[0] + 1, BLOCK=BLOCK, num_warps=8
        )


@triton.jit
def _added(  # type: ignore[no-untyped-def]  # Triton's types are its own
    own, came, out, N, stride, scale, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs are many and short: between those of a product each finds a place soon. What is read is read once,
    and leaves a cache to the product.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            value = tl.load(own + at, inside, 0.0, eviction_policy="evict_first")
        else:
            row = came + (rank - (rank > RANK)) * stride
            value = tl.load(row + at, inside, 0.0, eviction_policy="evict_first")
        total += value.to(tl.float32)
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), inside)
