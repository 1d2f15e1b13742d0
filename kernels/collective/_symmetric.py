"""Memory that all ranks of a host can read and write, and the flags by which their programs (CTAs) meet in it.

Every rank has a buffer of the same layout, and every rank knows the addresses of all of them: the call's number
and flags first, then one or two halves for data.

The number of the call is in the rank's own buffer and is advanced by the kernel: a CUDA graph that is replayed
goes on counting. It is there once for each program that a launch may have. A launch of fewer advances all of them,
so launches on one buffer may differ in their number of programs, as long as all ranks launch the same. The number
is never 0, which is what memory holds at first.

A flag is the number of a call: a program writes it to each peer (release, system scope) and waits until all peers'
have come to its own memory (acquire, system scope). A peer may be in the call behind this one already, never
further, as it waits there for this rank: any other number is of the past, however long ago. Programs meet those of
the same number.

Calls on one memory must follow one another on the device: in one stream, or where events put them in order. Two at
once would have one number. So would a graph's and those that run beside its replay.

Of two halves a call uses the one that the call before did not. Before a rank uses a half again it has waited, in
the call between, for something that each peer wrote in that call: whoever read that half has ended the kernel that
did. So nothing has to be waited for at a call's end. A kernel whose phases guard each other needs one half only,
and says why.

Multicast and in-switch reduction are not used, ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .._common import INTERPRETED, assembles

PHASES: tl.constexpr = tl.constexpr(2)
"""Meetings of one call at most."""
PROGRAMS = 4 if INTERPRETED else 128
"""Of a launch of words at most: all must be at work at once, one on each of an H200's 132 multiprocessors."""
PUSHING = 4 if INTERPRETED else 256
"""Of a launch of plain bytes at most: two of eight warps on each, which have registers for 128 a thread."""


class Tiles(NamedTuple):
    """How an array is cut: elements of a tile, which a program of so many warps takes at once."""

    block: int
    warps: int
    programs: int = PROGRAMS
    """At most; of fewer tiles fewer."""


class Symmetric(NamedTuple):
    """One rank's view. `peers` (world,) int64 holds the addresses of all ranks' buffers, its own among them."""

    peers: torch.Tensor
    rank: int
    world: int
    programs: int
    """Programs of a launch at most."""
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
_turns: dict[int, int] = {}
"""Of memory by its address here, how many turns it has had (`next_turn`)."""


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


def symmetric(
    group: Any, device: torch.device, programs: int, size: int, halves: int = 2, use: str = ""
) -> Symmetric:
    """The memory of a group for launches of so many programs at most, with at least `size` bytes a half; with one
    half, the smallest that is there already. It is zero at first, and of another `use` it is another.

    All ranks must ask for the same in the same order. What is outgrown stays until all is given up (`forget`), as
    a captured graph may use it.
    Raises RuntimeError in a capture before the first call outside of one.
    """
    import torch.distributed._symmetric_memory as memory

    capacity = capacity_for(size, halves)
    same = group.group_name, device, programs, halves, use
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
        buffer.zero_()
        torch.cuda.synchronize(device)
        handle = memory.rendezvous(buffer, group)
        dist.barrier(group)  # nobody sets a flag that is zeroed afterwards
        peers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
        return _known.setdefault(key, Symmetric(peers, rank, world, programs, capacity, buffer, handle))


_shares_host: dict[str, bool] = {}
"""Of groups, whether their ranks can have such memory, as all of them have found."""


def symmetric_if_any(
    group: Any, device: torch.device, programs: int, size: int, use: str = ""
) -> Symmetric | None:
    """As `symmetric` of one half; None where there is none: of one rank, on a CPU, among several hosts, or without
    access from each GPU to the others.
    """
    if device.type != "cuda" or dist.get_world_size(group) == 1 or not _shares_host.get(group.group_name, True):
        return None
    if group.group_name not in _shares_host and not torch.cuda.is_current_stream_capturing():
        # Not by trying: of some hosts' ranks one would fail while another waits for it.
        said: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, (BOOT.read_text(), _reaches(device)), group)
        _shares_host[group.group_name] = len({host for host, _ in said}) == 1 and all(able for _, able in said)
        return symmetric_if_any(group, device, programs, size, use)
    return symmetric(group, device, programs, size, halves=1, use=use)


BOOT = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of a host, other than their names."""


def _reaches(device: torch.device) -> bool:
    """Whether a GPU can use the memory of the others that this process sees."""
    others = [x for x in range(torch.cuda.device_count()) if x != device.index]
    return all(torch.cuda.can_device_access_peer(device, x) for x in others)


def next_turn(shared: Symmetric) -> int:
    """0, 1, 2, … by calls for this memory: the same in all ranks, which make the same calls. Counted by the host:
    a graph that is replayed would not count on. Raises RuntimeError in a capture.
    """
    if shared.buffer.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("turns are counted by the host: no CUDA graph may hold a call that takes one")
    with _lock:
        turn = _turns.get(shared.buffer.data_ptr(), 0)
        _turns[shared.buffer.data_ptr()] = turn + 1
        return turn


def taken(**inputs: Any) -> int:
    """Bytes of this rank's memory that its peers can read and write now; what a call is given does not matter."""
    with _lock:
        return sum(x.buffer.numel() for x in _known.values())


def forget() -> None:
    """Gives that memory up. No rank may have a call of it under way, nor replay a graph of one."""
    with _lock:
        _known.clear()
        _turns.clear()  # other memory may come to lie at the same address, in some ranks


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
def begin(own):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The number of this call, from this rank's buffer."""
    return _following(tl.load(own.to(tl.pointer_type(tl.int32)) + tl.program_id(0)))


@triton.jit
def _following(call):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The number of the call behind, which is never 0: after -1 comes 2, so that halves go on alternating."""
    return tl.where(call == -1, 2, call + 1)


@triton.jit
def end(own, call, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Advances the number: the program's own, and of those that this launch does not have its share."""
    tl.debug_barrier()  # all threads have read it
    at = tl.program_id(0) + tl.arange(0, PROGRAMS) * tl.num_programs(0)
    tl.store(own.to(tl.pointer_type(tl.int32)) + at, call, at < PROGRAMS)


@triton.constexpr_function
def _lanes(world):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return triton.next_power_of_2(world)


@triton.jit
def meet(  # type: ignore[no-untyped-def]  # Triton's types are its own
    own,
    peers,
    call,
    PHASE: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PHASES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Waits for the programs of this number in all ranks. What they wrote before is visible after."""
    slot = PROGRAMS + (PHASE * PROGRAMS + tl.program_id(0)) * WORLD
    tl.debug_barrier()  # all threads' writes come before the threads' release that follows
    # A thread for each peer: the fences, which wait for all that was written, do so at the same time.
    peer = tl.arange(0, _lanes(WORLD))
    theirs = tl.load(peers + peer, peer < WORLD, 0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + slot + RANK, call, peer < WORLD, sem="release", scope="sys")
    flags = own.to(tl.pointer_type(tl.int32)) + slot
    for rank in tl.static_range(WORLD):
        _wait(flags + rank, call)


@triton.jit
def _wait(flag, call):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Until the flag is of this call or the one behind it."""
    following = _following(call)
    if assembles():
        # Every thread for itself, which needs no barrier behind it.
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred before;
            AGAIN:
            ld.acquire.sys.global.b32 $0, [$1];
            setp.ne.s32 before, $0, $2;
            setp.ne.and.s32 before, $0, $3, before;
            @before bra AGAIN;
            }
            """,
            "=&r,l,r,r,~{memory}",
            [flag.to(tl.int64), call, following],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while (found != call) & (found != following):
            found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tl.debug_barrier()


@triton.jit
def copy(source, to, start, last, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A tile. Only a last one masks: a mask at an odd size would split every 16-byte access."""
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= last:
        tl.store(to + at, tl.load(source + at))
    else:
        tl.store(to + at, tl.load(source + at, at < last), at < last)
