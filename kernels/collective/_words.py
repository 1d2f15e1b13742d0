"""Words that say themselves whether they have come: 4 bytes of data beside the 4 bytes of a call's number.

Whoever waits for data reads the words where they will lie, in its own memory, until all of them bear the number
of the call. No fence and no flag is needed, and nobody asks over a link: the way from one rank to another is gone
once. It takes twice the bytes, so it is for arrays small enough that latency is all.

A word must come as a whole. It is written and read as one scalar of 8 bytes, aligned to 8, which PTX's memory
model never splits; of a vector of two of them, a pair, each is a scalar of its own, and each bears the number. (A
vector of four 4-byte numbers would be four accesses to that model, and nothing would join a number to its data.)
They are relaxed accesses of system scope: neither kept in registers nor in L1, not merged, not left out.

Numbers are compared for equality. What lies there is 0, which no call has, or of an earlier call; never of a later
one, which uses the other half until this one has ended. Only a word that nobody wrote over in 2^32 calls, whose
number comes again, would be mistaken.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._common import assembles, on
from ._symmetric import Symmetric, Tiles


def launch(
    kernel: triton.JITFunction,
    x: torch.Tensor,
    out: torch.Tensor,
    shared: Symmetric,
    size: int,
    count: int,
    scale: float,
    tiles: Tiles,
    **options: Any,
) -> None:
    """A kernel of words over slots of `count` tiles, of which `size` elements are there."""
    lanes = 8 // x.element_size()
    with on(x):
        kernel[(min(count, tiles.programs),)](
            x,
            out,
            shared.buffer,
            shared.peers,
            size,
            count,
            scale,
            shared.data // 8,
            shared.capacity // 8,
            RANK=shared.rank,
            WORLD=shared.world,
            PROGRAMS=shared.programs,
            PAIRS=tiles.block // lanes,
            LANES=lanes,
            num_warps=tiles.warps,
            **options,
        )


@triton.jit
def pack(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(P, 4) of 16 bits or (P, 2) of 32 bits to two numbers of 32 bits a row."""
    if x.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True).to(tl.int32), [x.shape[0], 2, 2]))
        return tl.split((low & 0xFFFF) | (high << 16))
    else:
        return tl.split(x.to(tl.int32, bitcast=True))


@triton.jit
def unpack(first, second, like):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The way back, to the numbers of a pointer's type."""
    word = tl.join(first, second)
    if like.dtype.element_ty.primitive_bitwidth == 16:
        both = tl.reshape(tl.join(word, word >> 16), [first.shape[0], 4])
        return both.to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    else:
        return word.to(like.dtype.element_ty, bitcast=True)


@triton.jit
def _word(data, call):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return (data.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)


@triton.jit
def send(to, first, second, call):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Writes pairs of words to where `to` points."""
    if assembles():
        tl.inline_asm_elementwise(
            """
            {
            .reg .b64 a, b;
            mov.b64 a, {$2, $4};
            mov.b64 b, {$3, $4};
            st.relaxed.sys.global.v2.b64 [$1], {a, b};
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r,r,~{memory}",
            [to.to(tl.int64), first, second, call],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(to, _word(first, call))
        tl.store(to + 1, _word(second, call))


@triton.constexpr_function
def _receiving(rank, world):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """PTX that reads a pair of each peer until all of them bear the number. All loads are under way at once."""
    words = 2 * (world - 1)
    address, stride, call = (f"${words + i}" for i in range(3))
    others = [x for x in range(world) if x != rank]
    lines = ["{", ".reg .pred missing;", f".reg .b32 number<{words}>;", f".reg .b64 word<{words}>;"]
    lines += [f".reg .b64 at<{len(others)}>;"]
    lines += [f"mad.lo.s64 at{i}, {stride}, {other}, {address};" for i, other in enumerate(others)]
    lines += ["AGAIN:"]
    for i in range(len(others)):
        lines += [f"ld.relaxed.sys.global.v2.b64 {{word{2 * i}, word{2 * i + 1}}}, [at{i}];"]
    lines += [f"mov.b64 {{${i}, number{i}}}, word{i};" for i in range(words)]
    lines += [f"setp.ne.s32 missing, number0, {call};"]
    lines += [f"setp.ne.or.s32 missing, number{i}, {call}, missing;" for i in range(1, words)]
    return "\n".join([*lines, "@missing bra AGAIN;", "}"])


@triton.constexpr_function
def _results(world):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Outputs are written before all inputs are read for the last time, hence `&`."""
    return ",".join(["=&r"] * (2 * world - 2) + ["l", "l", "r", "~{memory}"])


@triton.constexpr_function
def _types(world):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return (tl.int32,) * (2 * world - 2)


@triton.jit
def receive(  # type: ignore[no-untyped-def]  # Triton's types are its own
    at, stride, call, RANK: tl.constexpr, WORLD: tl.constexpr
):
    """Two numbers of 32 bits for each peer, in the order of ranks without this one, once they are there.

    `at` points to pairs of rank 0's slot; slots are `stride` words apart.
    """
    if assembles():
        return tl.inline_asm_elementwise(
            _receiving(RANK, WORLD),
            _results(WORLD),
            [at.to(tl.int64), tl.cast(stride, tl.int64) * 8, call],
            dtype=_types(WORLD),
            is_pure=False,
            pack=1,
        )
    else:
        found = ()
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                found += _pair(at + rank * stride, call)
        return found


@triton.jit
def _pair(at, call):  # type: ignore[no-untyped-def]  # Triton's types are its own
    first, second = tl.load(at, volatile=True), tl.load(at + 1, volatile=True)
    while tl.max((((first >> 32) != call) | ((second >> 32) != call)).to(tl.int32), 0) > 0:
        first, second = tl.load(at, volatile=True), tl.load(at + 1, volatile=True)
    return first.to(tl.int32), second.to(tl.int32)


@triton.jit
def words_of(peers, rank):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.int64)), 128)


@triton.jit
def others(peers, RANK: tl.constexpr, WORLD: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The same of all other ranks, from the next one on: all begin at different peers.

    For who sends, to be asked for before: no load overtakes a send, and each would wait for the one before it.
    """
    found = ()
    for turn in tl.static_range(1, WORLD):
        found += (words_of(peers, (RANK + turn) % WORLD),)
    return found


@triton.jit
def parts(x, at, chunk, N, RANK: tl.constexpr, WORLD: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A tile of each other rank's chunk of x (N,), from the next rank's on: loaded at once, as `others`.

    What is beyond a chunk's end is of the next one, and beyond the last one's zeros.
    """
    found = ()
    for turn in tl.static_range(1, WORLD):
        place = (RANK + turn) % WORLD * chunk + at
        found += (tl.load(x + place, place < N, 0.0),)
    return found


@triton.jit
def send_parts(tiles, to, rest, call, WORLD: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Each to its one of the others, at the same place in all."""
    for i in tl.static_range(WORLD - 1):
        low, high = pack(tiles[i])
        send(rest[i] + to, low, high, call)


@triton.jit
def send_tile(value, to, rest, call, WORLD: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The same to all others."""
    low, high = pack(value)
    for i in tl.static_range(WORLD - 1):
        send(rest[i] + to, low, high, call)


@triton.jit
def total(  # type: ignore[no-untyped-def]  # Triton's types are its own
    mine, theirs, like, RANK: tl.constexpr, WORLD: tl.constexpr
):
    """In fp32, in the order of ranks in all of them: they end with the same bits."""
    found = tl.zeros(mine.shape, tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            found += mine.to(tl.float32)
        elif rank < RANK:
            found += unpack(theirs[2 * rank], theirs[2 * rank + 1], like).to(tl.float32)
        else:
            found += unpack(theirs[2 * rank - 2], theirs[2 * rank - 1], like).to(tl.float32)
    return found
