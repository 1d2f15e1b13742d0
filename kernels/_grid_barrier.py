"""A barrier among the programs (CTAs) of one launch that share a row.

A row too long for one program is held in the registers of several. Each adds up its piece and writes the sum
to memory; then all arrive at a barrier and wait; then each reads the sums of all. So nothing of the row is read
twice. The barrier is that of Hensgen, Finkel and Manber (1988) with a phase number in place of a sense: the last
to arrive sets the count to 0 and increments the phase, on which the others spin. A slot (count, phase) therefore
serves any number of launches after one another, with any number of members. A launch whose programs only count,
and leave the count at 0, takes the count of a slot (`counter`).

All members of a barrier must be resident at some time. Hardware starts programs in the order of their numbers,
and members have neighbouring numbers, so those before them never wait for those after. Decoupled look-back
(Merrill and Garland 2016) relies on the same.
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl

from ._common import INTERPRETED, multiprocessors, power_of_2
from ._launch import _stream

SLOTS = 1 << 14
"""Slots of a device, 128 kB. A stream keeps its own; so does each launch that a graph has captured."""
MOST = 4096
"""Most slots of one launch."""

ROOM = 32768
"""Numbers that a multiprocessor holds for certain: 1024 threads with 32 each. Where programs have to wait for
others to end before they start, forward passes were slower on an H200 than reading twice.
"""

_lock = threading.Lock()


class _Pool:
    """A device's slots: zeroed once, handed out from the front."""

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
    """`count` slots (count, 2) int32 that no other launch uses at the same time, or None where there are none.

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
        # An object for the stream takes as long as a launch.
        stream = torch.cuda.current_stream(device).cuda_stream if _stream is None else _stream(device.index)
        known = pool.streams.get(stream)
        if known is None or known.shape[0] < count:  # a tensor's `len` takes ten times as long
            # By doubling, so that counts that grow one by one do not leave a trail of outgrown slots behind them.
            known = pool.take(power_of_2(count))
            known = pool.take(count) if known is None else known
            if known is None:
                return None
            pool.streams[stream] = known
        return known


def counter(tensor: torch.Tensor) -> torch.Tensor:
    """An int32 at the front that is 0 and that no other launch uses at the same time, for one that leaves it at 0.

    A slot's count; where `slots` has none, one that is zeroed now, for which the device runs one more kernel. A
    launch that fails has not counted, unless the device aborts it: then the process cannot use the device again.
    """
    slot = slots(tensor, 1)
    return torch.zeros(1, dtype=torch.int32, device=tensor.device) if slot is None else slot


def counters(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """(count, 2) int32 of which the first of each two is 0, as `counter` gives one."""
    found = slots(tensor, count)
    return torch.zeros(count, 2, dtype=torch.int32, device=tensor.device) if found is None else found


@triton.jit
def phase(slot):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The phase of a slot, which `arrive_and_wait` takes: read it early, then its latency is hidden."""
    return tl.load(slot + 1, volatile=True)


@triton.jit
def arrive_and_wait(slot, members, before):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Waits until all `members` have arrived. What each wrote to memory before is visible to all of them after."""
    tl.debug_barrier()
    if tl.atomic_add(slot, 1, sem="acq_rel") == members - 1:
        tl.atomic_xchg(slot, 0, sem="relaxed")
        tl.atomic_add(slot + 1, 1, sem="acq_rel")
    else:
        while tl.atomic_add(slot + 1, 0, sem="acquire") == before:
            pass
    tl.debug_barrier()
