"""Programs (CTAs) of one launch that hand each other numbers through shared memory: a thread block cluster.

Hopper runs the programs of a cluster at the same time on neighbouring multiprocessors, which reach each other's
shared memory. A row too long for one program is held in the registers of a cluster's: each adds up its piece,
gives its sums to all members, and goes on with those of all. So nothing of the row is read twice, and nothing goes
through memory to wait for, as it does at a barrier there (`_grid_barrier`).

Triton's own clusters (`num_ctas`) share out tensors, and their sums do not compile. A cluster here is one of
programs as ever: kernels are compiled for one program, and a launch alone says how many run together. Members have
neighbouring program numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from . import _launch
from ._common import INTERPRETED, capability, cdiv, multiprocessors, power_of_2
from ._launch import Launch, straight

PORTABLE = 8
"""Most members that every GPU with clusters takes."""
MOST = 16
"""Most members on a whole H100 or H200."""
WHOLE = 100
"""Multiprocessors from which on a GPU is taken for a whole one: 16 have to be near each other."""
PIECE = 2048
"""Elements of a program at least: starting it takes longer than the work on fewer."""
FEW = 20000, 4096
"""Where rows are so few that eight programs of each leave multiprocessors idle, by measurements on an H200: the
shortest row that clusters take, and the most elements of a program.
"""
WARP = 2048
"""Bytes of a piece for a warp: four loads of 16 bytes a thread."""


def most_members(tensor: torch.Tensor) -> int:
    """Most programs of a cluster on a tensor's device; 0 where kernels do not run in clusters."""
    known = _launch._DIRECT and (_launch._stream is not None or not tensor.is_cuda)
    if INTERPRETED or not known or capability(tensor.device) != (9, 0):
        return 0
    return MOST if multiprocessors(tensor) >= WHOLE else PORTABLE


def share(
    rows: int, D: int, margin: int, size: int, held: int, largest: int, most: int, processors: int
) -> tuple[int, int, int] | None:
    """(elements of a piece, members, warps) of clusters of at most `most` that hold a row each; None where none
    does. Rows are D elements of `size` bytes in each of `held` tensors and begin up to `margin` elements behind a
    boundary. Pieces have at most `largest` elements, or as `FEW` says.
    """
    if processors > rows * PORTABLE:
        largest = FEW[1] if FEW[0] <= D else 0
    if not largest:
        return None
    # Four programs a multiprocessor, or two of two tensors.
    wanted = max(power_of_2(rows * D * held // (4 * processors)), PIECE)
    # More members than all GPUs take where rows are so few that programs would not be.
    for limit in (most,) if processors > 4 * rows else (min(PORTABLE, most), most):
        piece = min(wanted, largest)
        while piece < largest and limit * piece < D + margin:
            piece *= 2
        if limit * piece >= D + margin:
            # Where a row starts anywhere, a weight is read by element: no more than 16 of a tensor a thread.
            least = piece // 512 if margin else 4
            return piece, cdiv(D + margin, piece), min(max(piece * size * held // WARP, least), 16)
    return None


def clusters(
    x: torch.Tensor, rows: int, D: int, margin: int, largest: int, held: int = 1
) -> tuple[int, int, int] | None:
    """As `share`, for rows of tensors like x. Each kernel says by measurements how large a piece of rows that are
    not few may be; 0 is for no clusters.
    """
    return share(rows, D, margin, x.element_size(), held, largest, most_members(x), multiprocessors(x))


def few_registers(piece: int, warps: int, shifted: bool) -> dict[str, int]:
    """What a kernel is compiled with that would else take registers of which a multiprocessor has too few for two
    programs of 16 warps or three of 8: while one waits for its piece, others have to be there. Nothing for others,
    which take more if they are told how many they may.
    """
    if shifted and warps == 16:
        return {"maxnreg": 64}
    return {"maxnreg": 80} if piece > 8192 and warps == 8 else {}


class ClusterLaunch(Launch):
    """A launch whose programs run in clusters of `members`. The grid counts programs, along one axis."""

    __slots__ = ("_members",)

    def __init__(self, kernel: Any, members: int, grid: tuple[int], *numbers: Any, **constants: Any) -> None:
        super().__init__(kernel, grid, *numbers, **constants)
        self._members = members

    def _first(self, device: torch.device, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """A launch through the just-in-time compiler, which compiles and no more, and with a profiler's hooks."""
        if device.type not in _launch._DEVICES:
            super()._first(device, tensors, numbers)
            return
        arguments = (*tensors, *numbers, *self._numbers)
        names = self._kernel.arg_names[len(arguments) :]
        tail = (*self._numbers, *(self._constants[name] for name in names))
        clusters = self._grid[0] // self._members, 1, 1
        with torch.cuda.device(device):
            compiled = self._kernel.warmup(*arguments, grid=self._grid, **self._constants)
            run, function = compiled.run, compiled.function
            warps, _, shared = compiled.packed_metadata
            if self._members > PORTABLE:
                # Asked how many such clusters there may be, Triton allows them to the kernel.
                driver.active.utils.cuOccupancyMaxActiveClusters(function, shared, self._members)
            together = warps, self._members, shared
            stream = _launch._stream(device.index)  # type: ignore[misc]  # is there with CUDA
            arguments = (*tensors, *numbers, *tail)
            about = compiled.launch_metadata(clusters, stream, *arguments)
            hooks = _launch._runtime.launch_enter_hook, _launch._runtime.launch_exit_hook
            run(*clusters, stream, function, together, about, *hooks, *arguments)
        launched, as_one, middle = straight(compiled)
        middle = tuple([together if x is compiled.packed_metadata else x for x in middle])
        self._bind(device, tensors, numbers, (launched, as_one, middle), clusters, tail)


@triton.jit
def begin():  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Says that this program runs, and gives its place in shared memory to `exchange`. Each once a kernel.

    To be called early: `exchange` waits until all members have, as no memory of theirs may be written before.
    """
    # A barrier at the front, which waits for one arrival, this one, and for eight bytes from each member.
    return tl.inline_asm_elementwise(
        """
        {
        .shared .align 16 .b8 pairs_of_members[144];
        .reg .pred first;
        .reg .b32 thread, bytes;
        mov.u32 $0, pairs_of_members;
        mov.u32 thread, %tid.x;
        mov.u32 bytes, %cluster_nctarank;
        shl.b32 bytes, bytes, 3;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.init.shared::cta.b64 [$0], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], bytes;
        barrier.cluster.arrive.relaxed.aligned;
        }
        """,
        "=&r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def exchange(pairs, first, second):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Gives two fp32 numbers to every member of the cluster and waits for theirs, which `of_members` takes."""
    # As many threads as members write the pair, each to one member, at this program's place there. The writes
    # count on the barrier there by themselves: nothing is fenced, and what goes to memory meanwhile delays nobody.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred writes, complete;
        .reg .b32 thread, number, own, there, at;
        mov.u32 thread, %tid.x;
        mov.u32 number, %cluster_nctarank;
        mov.u32 own, %cluster_ctarank;
        setp.lt.u32 writes, thread, number;
        mapa.shared::cluster.u32 there, $1, own;
        @writes mapa.shared::cluster.u32 there, $1, thread;
        shl.b32 own, own, 3;
        add.u32 at, there, own;
        barrier.cluster.wait.acquire.aligned;
        @writes st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [at + 16], {$2, $3}, [there];
        here:
        mbarrier.try_wait.parity.shared::cta.b64 complete, [$1], 0;
        @!complete bra.uni here;
        add.u32 $0, $1, 16;
        }
        """,
        "=&r,r,f,f",
        [pairs, first, second],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def of_members(pairs, which: tl.constexpr, member, members, other):  # type: ignore[no-untyped-def]  # as above
    """The first (`which` 0) or second (1) numbers that members (a tensor of less than 16) gave to `exchange`;
    `other` for those from `members` on, which there are not.
    """
    found = tl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];",
        "=f,r",
        [pairs + member * 8 + which * 4],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )
    return tl.where(member < members, found, other)
