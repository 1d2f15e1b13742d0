"""Dispatch and combine of tokens with experts among GPUs of one host, over peer pointers.

A token goes once to each rank that has experts of it, however many these are, and one row comes back from there:
what its experts there made of it, added up by weight. Of K experts drawn evenly over n ranks that is
n·(1 - (1 - 1/n)^K) rows a token each way, of which 1/n stay: of four ranks and eight experts 2.7 over links, where
a row for each expert is 6.

Each rank has two areas with a slot for each peer: one in which that peer's tokens come, one in which what became
of this rank's own comes back. A token has the same row in every slot. So where a row belongs follows from its
number: no counts are exchanged before, nothing is sorted, no host waits, and a CUDA graph can hold it. Memory is
for all tokens of all ranks, whatever experts they have. Three kernels, in one stream:

| kernel | reads | writes | then |
|---|---|---|---|
| `_dispatch` | own tokens and choices | `came` of peers: rows, experts there, weights | meets, phase 0 |
| `_multiply` | own `came` | own `came`, in place: row · Σ over its experts here of weight · scale | |
| `_combine`, first | own `came` | `back` of peers | meets, phase 1 |
| `_combine`, second | own `back` | out = Σ over ranks that had it | ends the call |

A model has its experts' products in the place of `_multiply`.

One half of memory is enough. A slot is of two ranks alone, s, whose tokens these are, and o, whose experts, and
lies at the same place for calls of all sizes. s writes to `came`, o may read and write it from their first meeting
until the second, and s writes there again in the call behind, after the second. o writes to `back` between the
two, s reads it after the second, and o writes there again after the first meeting of the call behind, to which s
comes when its kernel that read has ended. Programs meet those of the same number, but a kernel ends when all of
its programs have met: the next one finds what all of them wrote.

Not run on a GPU; the logic is tested with Triton's interpreter in several processes on shared memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, cdiv, check, on, power_of_2
from ._symmetric import PHASES, PUSHING, Symmetric, base, begin, end, meet, shares, symmetric

BLOCK, WARPS = (64, 4) if INTERPRETED else (2048, 8)
"""Elements of a row that a program takes at once, and its warps."""
TURN = 16
"""Elements of which rows in slots are whole multiples, as Triton asks for accesses of 16 bytes."""
LINE = 128
"""Bytes of which slots and what lies in them are whole multiples."""


def expert_exchange(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """(M, D): Σ over a token's experts of weight · scale[expert] · x, each at the rank that has the expert.

    x (M, D) in bf16, fp16 or fp32; experts (M, K) int32 or int64, each token's without a repetition, of those of
    all ranks: rank r of n has the r-th n-th of them; weights (M, K) fp32; scale (E / n, D) of this rank's experts,
    in the dtype of x. M, D, K and E / n are the same in all ranks of the default process group. Every rank must
    call it. Raises TypeError or ValueError.
    """
    check("x", x, dtypes=FLOATING, dim=2)
    check("experts", experts, dtypes=(torch.int32, torch.int64), dim=2, like=x)
    check("weights", weights, dtypes=(torch.float32,), shape=experts.shape, like=x)
    check("scale", scale, dtypes=(x.dtype,), dim=2, like=x)
    if experts.shape[0] != x.shape[0]:
        raise ValueError(f"experts has shape {tuple(experts.shape)}, expected {x.shape[0]} rows as x")
    if scale.shape[1] != x.shape[1]:
        raise ValueError(f"scale has shape {tuple(scale.shape)}, expected {x.shape[1]} columns as x")
    x, experts, weights, scale = (y.contiguous() for y in (x, experts, weights, scale))
    group = dist.group.WORLD
    world = dist.get_world_size(group)
    if not x.numel() or not experts.shape[1]:
        return torch.zeros_like(x)
    if world == 1:
        return (x * (weights[..., None] * scale[experts.long()]).sum(1)).to(x.dtype)
    size = 2 * world * slot_bytes(x, experts.shape[1])
    return exchanged(x, experts, weights, scale, symmetric(group, x.device, PUSHING, size, 1, "expert_exchange"))


shares(expert_exchange)


def slot_bytes(x: torch.Tensor, K: int) -> int:
    """Bytes of the slot of one peer: rows, and of each token its experts there and their weights, of 4 bytes
    each."""
    tokens, D = x.shape
    return cdiv(tokens * row_of(D) * x.element_size(), LINE) * LINE + cdiv(tokens * K * 8, LINE) * LINE


def row_of(D: int) -> int:
    """Elements of a row in a slot."""
    return cdiv(D, TURN) * TURN


def exchanged(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    scale: torch.Tensor,
    shared: Symmetric,
    block: int = BLOCK,
    programs: int = PUSHING,
    warps: int = WARPS,
) -> torch.Tensor:
    """As `expert_exchange`, of contiguous arrays, over the ranks of `shared`, which needs one half."""
    (tokens, D), K = x.shape, experts.shape[1]
    out = torch.empty_like(x)
    row, width = row_of(D), x.element_size()
    slot = shared.capacity // (2 * shared.world) // LINE * LINE  # at the same place whatever the sizes are
    choices = cdiv(tokens * row * width, LINE) * LINE  # bytes from a slot's begin to what is said of its rows
    back = shared.data + shared.world * slot
    grid = (min(tokens, programs, shared.programs),)
    there = shared.buffer, shared.peers, tokens, D, K, row
    constants = {"RANK": shared.rank, "WORLD": shared.world, "CHOICES": power_of_2(K), "BLOCK": block}
    meeting = {"PHASES": PHASES, "PROGRAMS": shared.programs}
    with on(x):
        _dispatch[grid](
            x, experts, weights, *there, scale.shape[0], shared.data, slot, choices, **constants, **meeting,
            num_warps=warps,
        )  # fmt: skip
        _multiply[(tokens, shared.world)](
            scale, *there[1:], shared.data, slot, choices, RANK=shared.rank, BLOCK=block, num_warps=warps
        )
        _combine[grid](
            out, experts, *there, scale.shape[0], shared.data, back, slot, choices, **constants, **meeting,
            num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit
def _slot(peers, rank, like, begin, slot, number):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A slot of a rank's area that begins at that byte, as a pointer of the type of `like`."""
    # In 64 bits, and of whole lines: the compiler cannot see that in an address that is loaded.
    first = begin + tl.cast(slot, tl.int64) * number
    return base(peers, rank, like) + tl.multiple_of(first // (like.dtype.element_ty.primitive_bitwidth // 8), 16)


@triton.jit
def _chosen(experts, token, K, CHOICES: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A token's experts, and -1 beside them."""
    k = tl.arange(0, CHOICES)
    return tl.load(experts + tl.cast(token, tl.int64) * K + k, k < K, -1).to(tl.int32)


@triton.jit
def _goes(chosen, own, rank):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Whether any of these experts is among a rank's, which has `own` of them."""
    return tl.max(((chosen >= rank * own) & (chosen < (rank + 1) * own)).to(tl.int32), 0) > 0


@triton.jit
def _dispatch(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    experts,
    weights,
    own,
    peers,
    tokens,
    D,
    K,
    row,
    held,
    came,
    slot,
    choices,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PHASES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p takes tokens p, p + programs, …: a row to each rank that has experts of it, and to every rank
    which of its `held` experts these are, -1 for those that are elsewhere.
    """
    call = begin(own)
    k = tl.arange(0, CHOICES)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        chosen = _chosen(experts, token, K, CHOICES)
        weight = tl.load(weights + tl.cast(token, tl.int64) * K + k, k < K, 0.0)
        source = x + tl.cast(token, tl.int64) * D
        for start in range(0, D, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(source + at, at < D, 0.0)
            for turn in tl.static_range(1, WORLD + 1):  # all begin at different peers
                peer = (RANK + turn) % WORLD
                to = _slot(peers, peer, x, came, slot, RANK) + tl.cast(token, tl.int64) * row
                tl.store(to + at, value, (at < D) & _goes(chosen, held, peer))
        for turn in tl.static_range(1, WORLD + 1):
            peer = (RANK + turn) % WORLD
            there = (chosen >= peer * held) & (chosen < (peer + 1) * held)
            numbers = _slot(peers, peer, weights.to(tl.pointer_type(tl.int32)), came + choices, slot, RANK)
            numbers += tl.cast(token, tl.int64) * (2 * K) + k
            tl.store(numbers, tl.where(there, chosen - peer * held, -1), k < K)
            tl.store(numbers.to(tl.pointer_type(tl.float32)) + K, weight, k < K)
    meet(own, peers, call, 0, RANK, WORLD, PHASES, PROGRAMS)


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]  # Triton's types are its own
    scale, peers, tokens, D, K, row, came, slot, choices, RANK: tl.constexpr, BLOCK: tl.constexpr
):
    """Of one token of one rank: its row times Σ weight · scale over its experts here, where it has any."""
    token = tl.program_id(0).to(tl.int64)
    source = tl.program_id(1)
    numbers = _slot(peers, RANK, scale.to(tl.pointer_type(tl.int32)), came + choices, slot, source) + token * (
        2 * K
    )
    shares = numbers.to(tl.pointer_type(tl.float32)) + K
    rows = _slot(peers, RANK, scale, came, slot, source) + token * row
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        factor = tl.zeros([BLOCK], tl.float32)
        some = 0
        for k in range(K):
            expert = tl.load(numbers + k)
            here = expert >= 0
            found = tl.load(scale + tl.cast(expert, tl.int64) * D + at, (at < D) & here, 0.0).to(tl.float32)
            factor += tl.load(shares + k) * found
            some += here.to(tl.int32)
        inside = (at < D) & (some > 0)
        made = tl.load(rows + at, inside, 0.0).to(tl.float32) * factor
        tl.store(rows + at, made.to(scale.dtype.element_ty), inside)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out,
    experts,
    own,
    peers,
    tokens,
    D,
    K,
    row,
    held,
    came,
    back,
    slot,
    choices,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PHASES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p takes tokens p, p + programs, … of every rank: those that came here go back; of this rank's own,
    once they meet, what came back is added up in fp32.
    """
    call = begin(own)
    k = tl.arange(0, CHOICES)
    for turn in tl.static_range(1, WORLD + 1):
        peer = (RANK + turn) % WORLD
        numbers = _slot(peers, RANK, experts.to(tl.pointer_type(tl.int32)), came + choices, slot, peer)
        for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
            here = tl.load(numbers + tl.cast(token, tl.int64) * (2 * K) + k, k < K, -1)
            source = _slot(peers, RANK, out, came, slot, peer) + tl.cast(token, tl.int64) * row
            to = _slot(peers, peer, out, back, slot, RANK) + tl.cast(token, tl.int64) * row
            for start in range(0, D, BLOCK):
                at = start + tl.arange(0, BLOCK)
                inside = (at < D) & (tl.max(here, 0) >= 0)
                tl.store(to + at, tl.load(source + at, inside, 0.0), inside)
    meet(own, peers, call, 1, RANK, WORLD, PHASES, PROGRAMS)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        chosen = _chosen(experts, token, K, CHOICES)
        for start in range(0, D, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(WORLD):
                source = _slot(peers, RANK, out, back, slot, rank) + tl.cast(token, tl.int64) * row
                inside = (at < D) & _goes(chosen, held, rank)
                total += tl.load(source + at, inside, 0.0).to(tl.float32)
            tl.store(out + tl.cast(token, tl.int64) * D + at, total.to(out.dtype.element_ty), at < D)
    end(own, call, PROGRAMS)
