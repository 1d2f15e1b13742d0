"""Shares of arrays among GPUs of one host over peer pointers: each rank sends to all others and takes what comes.

All-gather sends the same share to all, all-to-all and reduce-scatter each rank its own; reduce-scatter adds up
what comes. All take one way over a link and (n-1)/n of the whole array, S:

* In words that say themselves whether they have come (`_words`), for latency: 2·S·(n-1)/n bytes, no meeting.
* In plain bytes, for middle sizes: one meeting, and what came is copied to where it belongs.

Each operator has memory of its own, as they may be in several streams at once.

Run on two and four GPUs of one host; the logic is tested with Triton's interpreter in several processes on
shared memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, on
from ..quantization.gradient_compression import load, store
from ._symmetric import PHASES, PROGRAMS, PUSHING, Symmetric, Tiles, base, begin, copy, end, meet, symmetric
from ._words import launch, others, parts, receive, send_parts, send_tile, total, unpack, words_of

WORDS_BYTES = 1 << 20
"""Of the whole array: up to here words, beyond it plain bytes."""
PUSHED_BYTES = 32 << 20
"""Of the whole array: up to here plain bytes, beyond it copy engines or NCCL."""
WIDE_BYTES = 128 << 10
"""Of the whole array: from more on words take wider tiles."""
TURN = 16
"""Elements of which slots of plain bytes are whole multiples, as Triton asks for accesses of 16 bytes."""
NARROW = Tiles(256, 2) if INTERPRETED else Tiles(512, 4)
WIDE = Tiles(256, 2) if INTERPRETED else Tiles(2048, 16)
PUSHED = Tiles(256, 4, PUSHING) if INTERPRETED else Tiles(4096, 8, PUSHING)


def exchanged(x: torch.Tensor, out: torch.Tensor, shared: Symmetric, tiles: Tiles | None = None) -> None:
    """By words, shares of `out` (world · N,) come from each rank, by rank. Of x (N,) all ranks get the same, of x
    (world · N,) each its own share. `out` may have this rank's own share, N elements, for `x`.
    """
    tiles = tiles or words_tiles(out)
    size = out.numel() // shared.world
    launch(
        _words_exchanged, x, out, shared, size, cdiv(size, tiles.block), 1.0, tiles,
        SPREAD=x.numel() != size, ADDED=False, OWN=not _holds(out, x, shared),
    )  # fmt: skip


def scattered_sum(
    x: torch.Tensor, out: torch.Tensor, shared: Symmetric, scale: float = 1.0, tiles: Tiles | None = None
) -> None:
    """By words, `out` (N,) becomes scale · Σ over ranks of this rank's share of x (world · N,), in fp32 and in the
    order of ranks. `out` may be this rank's share of x.
    """
    tiles = tiles or words_tiles(x)
    size = out.numel()
    launch(
        _words_exchanged, x, out, shared, size, cdiv(size, tiles.block), scale, tiles,
        SPREAD=True, ADDED=True, OWN=False,
    )  # fmt: skip


def pushed(x: torch.Tensor, out: torch.Tensor, shared: Symmetric, tiles: Tiles = PUSHED) -> None:
    """As `exchanged`, in plain bytes."""
    size = out.numel() // shared.world
    with on(x):
        _pushed[(min(cdiv(size, tiles.block), tiles.programs),)](
            x,
            out,
            shared.buffer,
            shared.peers,
            size,
            slot(size),
            shared.data // x.element_size(),
            shared.capacity // x.element_size(),
            RANK=shared.rank,
            WORLD=shared.world,
            PHASES=PHASES,
            PROGRAMS=shared.programs,
            BLOCK=tiles.block,
            SPREAD=x.numel() != size,
            OWN=not _holds(out, x, shared),
            num_warps=tiles.warps,
        )


def words_tiles(whole: torch.Tensor) -> Tiles:
    """For shares of such an array."""
    return NARROW if whole.numel() * whole.element_size() <= WIDE_BYTES else WIDE


def words_memory(x: torch.Tensor, group: dist.ProcessGroup, use: str) -> Symmetric:
    """Where an operator's words lie, of that name; nothing else ever does."""
    size = words_bytes(dist.get_world_size(group))
    return symmetric(group, x.device, PROGRAMS, size, use=f"words of {use}")


def words_bytes(world: int) -> int:
    """Bytes of a half for the largest arrays, the last tiles of shares whole."""
    return 2 * (WORDS_BYTES + 4 * world * WIDE.block)


def pushed_memory(x: torch.Tensor, group: dist.ProcessGroup, use: str) -> Symmetric:
    """Where an operator's plain bytes come, of that name."""
    return symmetric(group, x.device, PUSHING, PUSHED_BYTES, use=f"bytes of {use}")


def pushes(share: int, width: int, world: int) -> bool:
    """Whether plain bytes are for shares of so many elements of so many bytes: others than whole multiples would
    go element by element. All ranks say the same.
    """
    return WORDS_BYTES < share * width * world <= PUSHED_BYTES and share % TURN == 0


def slot(size: int) -> int:
    """Elements of a slot for a share of so many."""
    return cdiv(size, TURN) * TURN


def _holds(out: torch.Tensor, x: torch.Tensor, shared: Symmetric) -> bool:
    """Whether x is where its rank's share of `out` belongs."""
    own = shared.rank * (out.numel() // shared.world) * out.element_size()
    return x.data_ptr() == out.data_ptr() + own


@triton.jit(do_not_specialize=["count"])  # which decides nothing: fewer kernels to compile
def _words_exchanged(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    out,
    own,
    peers,
    N,
    count,
    scale,
    data,
    half,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PAIRS: tl.constexpr,
    LANES: tl.constexpr,
    SPREAD: tl.constexpr,
    ADDED: tl.constexpr,
    OWN: tl.constexpr,
):
    """Program p takes the same ones of the `count` tiles of every share, in every rank. A slot for each rank.

    Halves and what is beyond the end of a share are as in `all_reduce._one_shot`. In place nothing is overwritten
    that is still to be sent: a rank's own share, where it is all that is written, goes to nobody; where it is all
    that is sent, it is not written.
    """
    pair = tl.arange(0, PAIRS)
    lane = pair[:, None] * LANES + tl.arange(0, LANES)[None, :]
    at = tl.program_id(0) * (PAIRS * LANES) + lane
    early = _shares(x, at, N, RANK, WORLD, SPREAD)  # under way while the call's number is
    rest = others(peers, RANK, WORLD)
    call = begin(own)
    first = data + (call & 1) * half
    stride = count * (2 * PAIRS)
    to = first + RANK * stride + 2 * pair
    _send_shares(early, to + tl.program_id(0) * (2 * PAIRS), rest, call, WORLD, SPREAD)
    for tile in range(tl.program_id(0) + tl.num_programs(0), count, tl.num_programs(0)):
        some = _shares(x, tile * (PAIRS * LANES) + lane, N, RANK, WORLD, SPREAD)
        _send_shares(some, to + tile * (2 * PAIRS), rest, call, WORLD, SPREAD)
    slots = words_of(peers, RANK) + first
    mine = x + RANK * N if SPREAD else x
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        at = tile * (PAIRS * LANES) + lane
        if ADDED:
            value = tl.load(mine + at, at < N, 0.0)
            theirs = receive(slots + tile * (2 * PAIRS) + 2 * pair, stride, call, RANK, WORLD)
            found = total(value, theirs, x, RANK, WORLD)
            tl.store(out + at, (found * scale).to(out.dtype.element_ty), at < N)
        else:
            if OWN:
                tl.store(out + RANK * N + at, tl.load(mine + at, at < N, 0.0), at < N)
            theirs = receive(slots + tile * (2 * PAIRS) + 2 * pair, stride, call, RANK, WORLD)
            for i in tl.static_range(WORLD - 1):
                part = out + (i + (i >= RANK)) * N
                tl.store(part + at, unpack(theirs[2 * i], theirs[2 * i + 1], out), at < N)
    end(own, call, PROGRAMS)


@triton.jit
def _shares(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, at, N, RANK: tl.constexpr, WORLD: tl.constexpr, SPREAD: tl.constexpr
):
    """A tile of what each peer gets; where all get the same, that alone."""
    if SPREAD:
        return parts(x, at, N, WORLD * N, RANK, WORLD)
    else:
        return tl.load(x + at, at < N, 0.0)


@triton.jit
def _send_shares(  # type: ignore[no-untyped-def]  # Triton's types are its own
    shares, to, rest, call, WORLD: tl.constexpr, SPREAD: tl.constexpr
):
    if SPREAD:
        send_parts(shares, to, rest, call, WORLD)
    else:
        send_tile(shares, to, rest, call, WORLD)


@triton.jit
def _pushed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    out,
    own,
    peers,
    N,
    slot,
    data,
    half,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PHASES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
    OWN: tl.constexpr,
):
    """Program p takes the same tiles of every share, in every rank: only programs of one number meet.

    One meeting is enough of two halves. A half was read in the call before the last, by kernels that peers had
    ended when they came to the meeting of the last call. Program 0, which every call has, was in that meeting.
    """
    call = begin(own)
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0) * BLOCK
    data += (call & 1) * half
    for start in range(first, N, step):
        if start + BLOCK <= N:
            _push(x, out, peers, N, start, data + RANK * slot, RANK, WORLD, BLOCK, SPREAD, OWN, False)
        else:
            _push(x, out, peers, N, start, data + RANK * slot, RANK, WORLD, BLOCK, SPREAD, OWN, True)
    meet(own, peers, call, 0, RANK, WORLD, PHASES, PROGRAMS)
    slots = base(peers, RANK, x) + data
    for turn in tl.static_range(1, WORLD):
        peer = (RANK + turn) % WORLD
        for start in range(first, N, step):
            copy(slots + peer * slot, out + peer * N, start, N, BLOCK)
    end(own, call, PROGRAMS)


@triton.jit
def _push(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    out,
    peers,
    N,
    start,
    to,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
    OWN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile of each share to its peer's slot for this rank; of its own, where it is not yet, to `out`."""
    at = start + tl.arange(0, BLOCK)
    if SPREAD:
        found = ()  # all are loaded before one is stored: no load overtakes a store
        for turn in tl.static_range(1, WORLD + 1):
            found += (load(x + (RANK + turn) % WORLD * N + at, at < N, MASKED),)
        for turn in tl.static_range(1, WORLD):  # all begin at different peers
            store(base(peers, (RANK + turn) % WORLD, x) + to + at, found[turn - 1], at < N, MASKED)
        if OWN:
            store(out + RANK * N + at, found[WORLD - 1], at < N, MASKED)
    else:
        value = load(x + at, at < N, MASKED)
        for turn in tl.static_range(1, WORLD):
            store(base(peers, (RANK + turn) % WORLD, x) + to + at, value, at < N, MASKED)
        if OWN:
            store(out + RANK * N + at, value, at < N, MASKED)
