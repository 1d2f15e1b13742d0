"""All-reduce among GPUs of one host over peer pointers: one-shot, two-shot, and NCCL for what is large.

Ranks write into each other's memory and read their own: what is written needs no answer before the next, what is
read over a link does.

* One-shot, for latency: every rank sends its array to every other, which adds up all of them. In words that say
  themselves whether they have come (`_words`): one way over a link, no meeting; 2·(n-1)·S bytes go out.
* Two-shot in such words: rank r gets the r-th part of all arrays, adds them up and sends the sum to every rank.
  Two ways; 4·S·(n-1)/n bytes, which of two ranks is no less than one-shot has: not for two.
* Two-shot in plain bytes, for middle sizes: 2·S·(n-1)/n of them, as a ring has, in two steps and not 2(n-1), and
  two meetings.
* Above, links are full either way and NCCL's pipelining wins.

Run on two and four GPUs of one host; the logic is tested with Triton's interpreter in several processes on shared
memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, cdiv, check, choice, on
from ..quantization.gradient_compression import load, store
from ._symmetric import (
    PHASES,
    PROGRAMS,
    PUSHING,
    Symmetric,
    Tiles,
    base,
    begin,
    copy,
    end,
    meet,
    shares,
    symmetric,
)
from ._words import launch, others, parts, receive, send_parts, send_tile, total, unpack, words_of

ONE_SHOT_BYTES = 256 << 10
"""Up to so many that go to peers, (n-1)·S, in one shot of words; of two ranks wherever words pay."""
WIDE_BYTES = 128 << 10
"""From an array of more bytes on one shot takes wider tiles."""
WORDS_BYTES = 1 << 20
"""Up to here words, beyond it plain bytes."""
TWO_SHOT_BYTES = 64 << 20
"""Up to here two-shot, beyond it NCCL."""
TURN = 128
"""Elements of which parts of an array are whole multiples, so that all begin at whole lines."""


ONE_SHOT = Tiles(256, 2) if INTERPRETED else Tiles(512, 4)
WIDE = Tiles(256, 2) if INTERPRETED else Tiles(2048, 16)
WORDS = Tiles(256, 2) if INTERPRETED else Tiles(1024, 8)
"""A pair of words a thread, as a thread waits for one after the other."""
PUSHED = Tiles(256, 4, PUSHING) if INTERPRETED else Tiles(4096, 8, PUSHING)
"""Two accesses of 16 bytes a thread under way, in 16 bits."""


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
    scale = 1.0 / world if place == "in" else 1.0
    if size <= one_shot_bytes(world):
        one_shot(x, out, words_memory(x, group), scale, ONE_SHOT if size <= WIDE_BYTES else WIDE)
    elif size <= WORDS_BYTES:
        two_shot_of_words(x, out, words_memory(x, group), scale)
    else:
        two_shot(x, out, pushed_memory(x, group), scale)
    return out


shares(all_reduce)


def words_memory(x: torch.Tensor, group: dist.ProcessGroup) -> Symmetric:
    """Where words lie: nothing else ever does, as it might pass for a call's number."""
    return symmetric(group, x.device, PROGRAMS, words_bytes(dist.get_world_size(group)), use="words")


def words_bytes(world: int) -> int:
    """Bytes of a half for either kernel of words and the largest arrays that it gets, their last tiles whole."""
    tile = 4 * max(ONE_SHOT.block, WIDE.block, WORDS.block)
    return 2 * world * max(one_shot_bytes(world) + tile, 2 * (WORDS_BYTES // world + tile))


def one_shot_bytes(world: int) -> int:
    """Bytes of the largest array in one shot."""
    return WORDS_BYTES if world == 2 else ONE_SHOT_BYTES // (world - 1)


def pushed_memory(x: torch.Tensor, group: dist.ProcessGroup) -> Symmetric:
    """What `two_shot` writes to: one half, of two areas."""
    return symmetric(group, x.device, PUSHING, pushed_bytes(x, dist.get_world_size(group)), halves=1)


def pushed_bytes(x: torch.Tensor, world: int) -> int:
    """Bytes of the areas of `two_shot`."""
    return 2 * world * part(x.numel(), world) * x.element_size()


def part(size: int, world: int) -> int:
    """Elements of a rank's part of an array, of which the last ones' may be shorter or nothing."""
    return cdiv(size, world * TURN) * TURN


def one_shot(x: torch.Tensor, out: torch.Tensor, shared: Symmetric, scale: float, tiles: Tiles = ONE_SHOT) -> None:
    """`out` becomes scale · Σ x over the ranks of `shared`; `out` may be `x`."""
    count = cdiv(x.numel(), tiles.block)
    launch(_one_shot, x, out, shared, x.numel(), count, scale, tiles)


def two_shot_of_words(
    x: torch.Tensor, out: torch.Tensor, shared: Symmetric, scale: float, tiles: Tiles = WORDS
) -> None:
    """As `one_shot`."""
    count = cdiv(x.numel(), shared.world * tiles.block)
    launch(_two_shot_of_words, x, out, shared, x.numel(), count, scale, tiles)


def two_shot(x: torch.Tensor, out: torch.Tensor, shared: Symmetric, scale: float, tiles: Tiles = PUSHED) -> None:
    """As `one_shot`, in plain bytes; `shared` needs one half."""
    chunk = part(x.numel(), shared.world)
    with on(x):
        _two_shot[(min(cdiv(chunk, tiles.block), tiles.programs),)](
            x,
            out,
            shared.buffer,
            shared.peers,
            x.numel(),
            chunk,
            scale,
            shared.data // x.element_size(),
            shared.capacity // 2 // x.element_size(),
            RANK=shared.rank,
            WORLD=shared.world,
            PHASES=PHASES,
            PROGRAMS=shared.programs,
            BLOCK=tiles.block,
            num_warps=tiles.warps,
        )


@triton.jit(do_not_specialize=["count"])  # which decides nothing: fewer kernels to compile
def _one_shot(  # type: ignore[no-untyped-def]  # Triton's types are its own
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
):
    """Program p takes tiles p, p + programs, … of the array, in every rank the same ones: it sends its own to all
    peers and then waits for theirs, which lie in a slot for each rank.

    Tiles are sent whole, whatever is beyond the array's end: whoever waits looks at no end. So every call, however
    small the array, has program 0 wait for words of each peer, which is what using a half again takes. How an
    array of another size lay in it does not matter: at every place is 0 or an earlier call's word.
    In place no element is overwritten before it was sent and read: what is written comes of it.
    """
    pair = tl.arange(0, PAIRS)
    lane = pair[:, None] * LANES + tl.arange(0, LANES)[None, :]
    at = tl.program_id(0) * (PAIRS * LANES) + lane
    mine = tl.load(x + at, at < N, 0.0)  # under way while the call's number is
    rest = others(peers, RANK, WORLD)
    call = begin(own)
    first = data + (call & 1) * half
    stride = count * (2 * PAIRS)
    to = first + RANK * stride + 2 * pair
    send_tile(mine, to + tl.program_id(0) * (2 * PAIRS), rest, call, WORLD)
    for tile in range(tl.program_id(0) + tl.num_programs(0), count, tl.num_programs(0)):
        at = tile * (PAIRS * LANES) + lane
        send_tile(tl.load(x + at, at < N, 0.0), to + tile * (2 * PAIRS), rest, call, WORLD)
    slots = words_of(peers, RANK) + first
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        at = tile * (PAIRS * LANES) + lane
        mine = tl.load(x + at, at < N, 0.0)
        theirs = receive(slots + tile * (2 * PAIRS) + 2 * pair, stride, call, RANK, WORLD)
        found = total(mine, theirs, x, RANK, WORLD)
        tl.store(out + at, (found * scale).to(out.dtype.element_ty), at < N)
    end(own, call, PROGRAMS)


@triton.jit(do_not_specialize=["count"])  # which decides nothing: fewer kernels to compile
def _two_shot_of_words(  # type: ignore[no-untyped-def]  # Triton's types are its own
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
):
    """Program p takes the same ones of the `count` tiles of every rank's part, in every rank.

    A slot for each rank for its summands, and behind these one for each rank for the sums of its part. Halves,
    ends of arrays and what is in place are as in `_one_shot`.
    """
    pair = tl.arange(0, PAIRS)
    lane = pair[:, None] * LANES + tl.arange(0, LANES)[None, :]
    chunk = count * (PAIRS * LANES)
    early = parts(x, tl.program_id(0) * (PAIRS * LANES) + lane, chunk, N, RANK, WORLD)
    rest = others(peers, RANK, WORLD)
    call = begin(own)
    first = data + (call & 1) * half
    stride = count * (2 * PAIRS)
    to = first + RANK * stride + 2 * pair
    send_parts(early, to + tl.program_id(0) * (2 * PAIRS), rest, call, WORLD)
    for tile in range(tl.program_id(0) + tl.num_programs(0), count, tl.num_programs(0)):
        some = parts(x, tile * (PAIRS * LANES) + lane, chunk, N, RANK, WORLD)
        send_parts(some, to + tile * (2 * PAIRS), rest, call, WORLD)
    slots = words_of(peers, RANK) + first
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        at = (RANK * count + tile) * (PAIRS * LANES) + lane
        mine = tl.load(x + at, at < N, 0.0)
        theirs = receive(slots + tile * (2 * PAIRS) + 2 * pair, stride, call, RANK, WORLD)
        mean = (total(mine, theirs, x, RANK, WORLD) * scale).to(x.dtype.element_ty)
        to = first + (WORLD + RANK) * stride + tile * (2 * PAIRS) + 2 * pair
        send_tile(mean, to, rest, call, WORLD)
        tl.store(out + at, mean, at < N)
    slots += WORLD * stride
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        theirs = receive(slots + tile * (2 * PAIRS) + 2 * pair, stride, call, RANK, WORLD)
        for i in tl.static_range(WORLD - 1):
            at = ((i + (i >= RANK)) * count + tile) * (PAIRS * LANES) + lane
            tl.store(out + at, unpack(theirs[2 * i], theirs[2 * i + 1], out), at < N)
    end(own, call, PROGRAMS)


@triton.jit
def _two_shot(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    out,
    own,
    peers,
    N,
    chunk,
    scale,
    data,
    area,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PHASES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p takes the same tiles of every rank's part, in every rank: only programs of one number wait for
    another.

    A rank's memory has two areas, which lie at the same places for arrays of all sizes: in the first a slot for
    each rank, into which that one writes its summands for this rank's part; in the second the sums of all parts,
    each written by the rank that has it. One half is enough. The first area is written before the first meeting:
    whoever read there in the call before did so before the second meeting of that call, in which all programs of
    this rank were, as that call's kernel has ended. The second is written after the first meeting: whoever read
    there in the call before has ended that kernel.

    A rank's own part goes nowhere. In place it is overwritten by who has read it, the others' once they were sent.
    """
    call = begin(own)
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0) * BLOCK
    for turn in tl.static_range(1, WORLD):  # all begin at different peers
        peer = (RANK + turn) % WORLD
        last = tl.minimum(chunk, N - peer * chunk)
        slot = base(peers, peer, x) + data + RANK * chunk
        for start in range(first, last, step):
            copy(x + peer * chunk, slot, start, last, BLOCK)
    meet(own, peers, call, 0, RANK, WORLD, PHASES, PROGRAMS)
    last = tl.minimum(chunk, N - RANK * chunk)
    for start in range(first, last, step):
        if start + BLOCK <= last:
            _add(x, out, peers, chunk, scale, data, area, start, last, RANK, WORLD, BLOCK, False)
        else:
            _add(x, out, peers, chunk, scale, data, area, start, last, RANK, WORLD, BLOCK, True)
    meet(own, peers, call, 1, RANK, WORLD, PHASES, PROGRAMS)
    for turn in tl.static_range(1, WORLD):
        peer = (RANK + turn) % WORLD
        last = tl.minimum(chunk, N - peer * chunk)
        sums = base(peers, RANK, x) + data + area + peer * chunk
        for start in range(first, last, step):
            copy(sums, out + peer * chunk, start, last, BLOCK)
    end(own, call, PROGRAMS)


@triton.jit
def _add(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    out,
    peers,
    chunk,
    scale,
    data,
    area,
    start,
    last,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Sums of a tile of this rank's part, in the order of ranks, to every rank."""
    at = start + tl.arange(0, BLOCK)
    slots = base(peers, RANK, x) + data
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += load(x + RANK * chunk + at, at < last, MASKED).to(tl.float32)
        else:
            total += load(slots + rank * chunk + at, at < last, MASKED).to(tl.float32)
    mean = (total * scale).to(x.dtype.element_ty)
    for turn in tl.static_range(1, WORLD):
        sums = base(peers, (RANK + turn) % WORLD, x) + data + area + RANK * chunk
        store(sums + at, mean, at < last, MASKED)
    store(out + RANK * chunk + at, mean, at < last, MASKED)
