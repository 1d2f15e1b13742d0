"""Memory that all ranks of a host can read and write, and the flags by which their programs (CTAs) meet in it.

Every rank has a buffer of the same layout, and every rank knows the addresses of all of them: flags first, then
two halves for data, of which whoever meets its peers at a call's end too needs only one. A call uses the half that
the call before did not. Before a rank reuses a half it has met the others in the call between: whoever read that
half has ended the kernel that did. So one meeting a phase is enough and nothing has to be waited for at a call's
end.

A flag is the number of a call, which only grows: a program writes it to each peer (release, system scope) and
waits until all peers' have come to its own memory (acquire, system scope). Programs meet those of the same number,
so launches on one buffer have one number of programs. The number of the call is in the rank's own buffer and is
advanced by the kernel: a CUDA graph that is replayed goes on counting.

Multicast and in-switch reduction are not used, ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

PHASES: tl.constexpr = tl.constexpr(2)
"""Meetings of one call at most."""


class Symmetric(NamedTuple):
    """One rank's view. `peers` (world,) int64 holds the addresses of all ranks' buffers, its own among them."""

    peers: torch.Tensor
    rank: int
    world: int
    programs: int
    capacity: int
    """Bytes of a half."""
    buffer: torch.Tensor
    handle: Any

    @property
    def data(self) -> int:
        """Bytes before the first half."""
        return flags_bytes(self.world, self.programs)


def flags_bytes(world: int, programs: int) -> int:
    """Of the calls' number by program, and of flags by phase, program and rank, in whole lines of 128 bytes."""
    return -(-4 * (programs + PHASES.value * programs * world) // 128) * 128


_lock = threading.Lock()
_known: dict[tuple[Any, ...], Symmetric] = {}


def capacity_for(size: int, halves: int) -> int:
    """Bytes of a half for arrays of `size` bytes: powers of two, and where there is one half only, as large arrays
    have, eighths of them.
    """
    power = max(1 << 16, 1 << (size - 1).bit_length())
    step = power if halves == 2 else power >> 4
    return max(1 << 16, -(-size // step) * step)


def buffer_bytes(world: int, programs: int, size: int, halves: int) -> int:
    """Bytes that each rank takes for that."""
    return flags_bytes(world, programs) + halves * capacity_for(size, halves)


def symmetric(group: Any, device: torch.device, programs: int, size: int, halves: int = 2) -> Symmetric:
    """The memory of a group for launches of so many programs, with at least `size` bytes a half; with one half,
    the smallest that is there already.

    All ranks must ask for the same in the same order. What is outgrown stays until all is given up (`forget`), as
    a captured graph may use it.
    Raises RuntimeError in a capture before the first call outside of one.
    """
    import torch.distributed._symmetric_memory as memory

    capacity = capacity_for(size, halves)
    same = group.group_name, device, programs, halves
    with _lock:
        enough = [x for (*other, x) in _known if tuple(other) == same and x >= capacity]
        if halves == 1 and enough:
            capacity = min(enough)
        key = *same, capacity
        found = _known.get(key)
        if found is not None:
            return found
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("symmetric memory is made at the first call, which must be outside of a graph")
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        buffer = memory.empty(buffer_bytes(world, programs, size, halves), dtype=torch.uint8, device=device)
        buffer[: flags_bytes(world, programs)].zero_()
        torch.cuda.synchronize(device)
        handle = memory.rendezvous(buffer, group)
        dist.barrier(group)  # nobody sets a flag that is zeroed afterwards
        peers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        return _known.setdefault(key, Symmetric(peers, rank, world, programs, capacity, buffer, handle))


def taken(**inputs: Any) -> int:
    """Bytes of this rank's memory that its peers can read and write now; what a call is given does not matter."""
    with _lock:
        return sum(x.buffer.numel() for x in _known.values())


def forget() -> None:
    """Gives that memory up. No rank may have a call of it under way, nor replay a graph of one."""
    with _lock:
        _known.clear()


def shares(*calls: Callable[..., Any]) -> None:
    """Lets the harness ask of these how much memory peers can read, and to give it up."""
    for call in calls:
        call.shared, call.forget = taken, forget  # type: ignore[attr-defined]


@triton.jit
def base(peers, rank, like):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A rank's buffer as a pointer of the type of `like`.

    It begins at a page, which an address that is loaded does not say: each element would be an access of its own.
    """
    return tl.multiple_of(tl.load(peers + rank).to(like.dtype), 128)


@triton.jit
def begin(peers, RANK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The number of this call, from 1 on: the program's own count, advanced."""
    count = tl.load(peers + RANK).to(tl.pointer_type(tl.int32)) + tl.program_id(0)
    return tl.atomic_add(count, 1, sem="relaxed") + 1


@triton.jit
def meet(  # type: ignore[no-untyped-def]  # Triton's types are its own
    peers, call, PHASE: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PHASES: tl.constexpr
):
    """Waits for the programs of this number in all ranks. What they wrote before is visible after."""
    programs = tl.num_programs(0)
    slot = programs + (PHASE * programs + tl.program_id(0)) * WORLD
    tl.debug_barrier()  # all threads' writes come before one thread's release
    for peer in tl.static_range(WORLD):
        theirs = tl.load(peers + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + slot + RANK, call, sem="release", scope="sys")
    own = tl.load(peers + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD):
        # A difference, so that the count may wrap.
        while tl.atomic_add(own + slot + peer, 0, sem="acquire", scope="sys") - call < 0:
            pass
    tl.debug_barrier()
