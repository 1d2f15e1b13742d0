"""A place where programs of one launch wait for each other, for what takes all parts of a row at once.

A row too long for one program is held in the registers of several: each adds up its part, wait for each other, and each
goes on with the sums of all, so that nothing is read twice. The barrier is that of Hensgen, Finkel and Manber
(1988) with a number in place of a sense: who comes last clears the count and moves the number on, for which the
others wait. A place so serves any number of launches after one another, with any number of members. A launch whose
programs only count, by a number that they leave at 0, has a place's count for that (`counter`).

That the members of a place are all running at some time is what hardware gives that starts programs in the order
of their numbers, where members have neighbouring ones: those before them never wait for those after. Decoupled
look-back (Merrill and Garland 2016) relies on the same.
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl

from ._common import INTERPRETED, multiprocessors

SLOTS = 1 << 14
"""Places of a device, 128 kB. A stream keeps its own; so does each launch that a graph has captured."""
MOST = 4096
"""Most places of one launch."""

ROOM = 32768
"""Numbers that a multiprocessor holds for certain: 1024 threads with 32 each. Where programs have to wait for
others to end before they start, forward passes were slower on an H200 than reading twice.
"""

_lock = threading.Lock()


class _Pool:
    """A device's places: zeroed once, handed out from the front."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(SLOTS, 2, dtype=torch.int32, device=device)
        # Streams other than this one may be the first to use it.
        torch.cuda.current_stream(device).synchronize()
        self.free = 0
        self.streams: dict[int, torch.Tensor] = {}

    def take(self, count: int) -> torch.Tensor | None:
        if self.free + count > SLOTS:
            return None
        self.free += count
        return self.memory[self.free - count : self.free]


_pools: dict[torch.device, _Pool] = {}


def slots(tensor: torch.Tensor, count: int, held: int = 0) -> torch.Tensor | None:
    """`count` places (count, 2) int32 that no other launch uses at the same time, or None where there are none.

    None under the interpreter, which runs one program after another; for more than `MOST`; for more numbers `held`
    than registers have room for; when a device has no more; and in the capture of a graph before the first launch
    outside, as nothing can be zeroed once there.
    """
    if INTERPRETED or count > MOST or not tensor.is_cuda or held > multiprocessors(tensor) * ROOM:
        return None
    device = tensor.device
    captured = torch.cuda.is_current_stream_capturing()
    with _lock:
        pool = _pools.get(device)
        if pool is None:
            if captured:
                return None
            pool = _pools[device] = _Pool(device)
        if captured:
            return pool.take(count)
        stream = torch.cuda.current_stream(device).cuda_stream
        known = pool.streams.get(stream)
        if known is None or len(known) < count:
            known = pool.take(count)
            if known is None:
                return None
            pool.streams[stream] = known
        return known


def counter(tensor: torch.Tensor) -> torch.Tensor:
    """An int32 at the front that is 0 and that no other launch uses at the same time, for one that leaves it at 0.

    A place's count; where `places` has none, one that is zeroed now, for which the device runs one more kernel. A
    launch that fails has not counted, unless the device aborts it: then the process cannot use the device again.
    """
    place = slots(tensor, 1)
    return torch.zeros(1, dtype=torch.int32, device=tensor.device) if place is None else place


def counters(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """(count, 2) int32 of which the first of each two is 0, as `counter` gives one."""
    found = slots(tensor, count)
    return torch.zeros(count, 2, dtype=torch.int32, device=tensor.device) if found is None else found


def launches(place: torch.Tensor | None) -> tuple[tuple[bool, bool], ...]:
    """Launches, each by whether it makes what is exchanged and whether it uses it: one where programs can wait."""
    return ((True, False), (False, True)) if place is None else ((True, True),)


@triton.jit
def phase(place):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """What `arrive_and_wait` needs to know of a place from before; read it early, its wait is hidden then."""
    return tl.load(place + 1, volatile=True)


@triton.jit
def arrive_and_wait(place, members, before):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Waits until all `members` are here. What each wrote to memory before, all of them read behind it."""
    tl.debug_barrier()
    if tl.atomic_add(place, 1, sem="acq_rel") == members - 1:
        tl.atomic_xchg(place, 0, sem="relaxed")
        tl.atomic_add(place + 1, 1, sem="acq_rel")
    else:
        while tl.atomic_add(place + 1, 0, sem="acquire") == before:
            pass
    tl.debug_barrier()
