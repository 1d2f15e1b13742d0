"""All-reduce of gradients in 8 bits with error feedback: half a byte's worth of bf16 on the wire.

The array and what earlier calls lost are added up and rounded to int8, or to E4M3 (`fp8`), with an fp32 scale
for each 128 elements (`gradient_compression`). Rank r gets the r-th chunk of all ranks, adds them up in fp32,
rounds the sum in the same way and sends it to all. What the first rounding lost is the new residual; what the
second lost is in the r-th chunk of rank r's residual too, so that nothing is lost for good: over steps the sums
are those of exact gradients.

Sent: 2·S·(n-1)/n · 33/64 bytes of bf16's, against 2·S·(n-1)/n.
Among GPUs of one host it is one kernel over their memory; elsewhere kernels with collectives between them, which
come to the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, check, choice, dense_like, needs_e4m3, on, on_e4m3
from ..quantization.gradient_compression import (
    GROUP,
    LARGEST,
    gradient_compression,
    load,
    quantized,
    sections,
    store,
)
from ..quantization.gradient_decompression import dequantized, gradient_decompression
from ._symmetric import PHASES, Symmetric, begin, end, meet, shares, symmetric_if_any

GROUPS = 4 if INTERPRETED else 16
"""Groups of a program."""
PROGRAMS = 4 if INTERPRETED else 256
"""Of a launch over peers' memory at most, see `PUSHING`; both meet in the same memory."""
TILE, WARPS = (4, 4) if INTERPRETED else (32, 8)
"""Groups that such a program takes at once, and its warps."""


def all_reduce_quantized(
    x: torch.Tensor, residual: torch.Tensor, scheme: str = "int8"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over ranks of x + residual, new residual), both like `x`.

    x (N,) in bf16, fp16 or fp32, N the same in all ranks of the default process group; residual fp32 (N,): zeros
    at first, then what the last call gave; scheme "int8" or "fp8", of E4M3, the same in all ranks. Where N is no
    multiple of 128 · world both are copied, with zeros up to one. Every rank must call it. Raises TypeError for a
    wrong dtype, ValueError for a wrong shape or scheme, NotImplementedError for E4M3 on a GPU without it.
    """
    check("x", x, dim=1)
    check("residual", residual, dtypes=(torch.float32,), shape=x.shape, like=x)
    choice("scheme", scheme, ("int8", "fp8"))
    world, rank = dist.get_world_size(), dist.get_rank()
    N = x.numel()
    if more := -N % (GROUP * world):
        x, residual = (torch.nn.functional.pad(y, (0, more)) for y in (x, residual))
        out, rest = all_reduce_quantized(x, residual, scheme)
        return out[:N], rest[:N]
    shared = symmetric_if_any(dist.group.WORLD, x.device, PROGRAMS, pushed_bytes(N)) if N else None
    if shared is not None:
        return pushed(x, residual, shared, scheme)
    payload, rest = gradient_compression(x, residual, scheme)
    values, scales = sections(payload, N, scheme, 1, x.dtype)
    theirs, their_scales = torch.empty_like(values), torch.empty_like(scales)
    dist.all_to_all_single(_bytes(theirs), _bytes(values))
    dist.all_to_all_single(their_scales, scales)
    chunk = N // world
    sums, sum_scales, lost = values.new_empty(chunk), scales.new_empty(chunk // GROUP), rest.new_empty(chunk)
    with on(x):
        _requantize[(cdiv(chunk // GROUP, GROUPS),)](
            theirs,
            their_scales,
            sums,
            sum_scales,
            lost,
            chunk // GROUP,
            WORLD=world,
            LARGEST=LARGEST[scheme],
            INTEGER=scheme == "int8",
            GROUPS=GROUPS,
            GROUP=GROUP,
        )
    rest[rank * chunk : (rank + 1) * chunk] += lost
    whole = torch.empty_like(payload)
    whole_values, whole_scales = sections(whole, N, scheme, 1, x.dtype)
    dist.all_gather_into_tensor(_bytes(whole_values), _bytes(sums))
    dist.all_gather_into_tensor(whole_scales, sum_scales)
    return gradient_decompression(whole, N, x.dtype, scheme), rest


shares(all_reduce_quantized)


def pushed_bytes(N: int) -> int:
    """Bytes of the two areas of `pushed`, each of a value an element and a scale a group."""
    return 2 * (N + 4 * (N // GROUP))


def pushed(
    x: torch.Tensor,
    residual: torch.Tensor,
    shared: Symmetric,
    scheme: str,
    programs: int = PROGRAMS,
    tile: int = TILE,
    warps: int = WARPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `all_reduce_quantized`, over the ranks of `shared`, which needs one half."""
    if scheme == "fp8":
        needs_e4m3("all_reduce_quantized to E4M3", x)
    x, residual = x.contiguous(), residual.contiguous()
    out, rest = dense_like(x), dense_like(residual)
    groups = x.numel() // (GROUP * shared.world)
    with on(x):
        _pushed[(min(cdiv(groups, tile), programs),)](
            x,
            residual,
            out,
            rest,
            shared.buffer,
            shared.peers,
            groups,
            shared.data,
            shared.capacity // 2,
            RANK=shared.rank,
            WORLD=shared.world,
            PHASES=PHASES,
            PROGRAMS=shared.programs,
            LARGEST=LARGEST[scheme],
            INTEGER=scheme == "int8",
            GROUPS=tile,
            GROUP=GROUP,
            num_warps=warps,
        )
    return out, rest


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """As groups of processes take them, not all of which know E4M3."""
    return values.view(torch.uint8)


@triton.jit
def _requantized(  # type: ignore[no-untyped-def]  # Triton's types are its own
    values,
    scales,
    groups,
    at,
    group,
    there,
    WORLD: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The sum of WORLD quantized chunks of `groups` groups, quantized again: (value, still fp32; scale; what that
    loses) of the groups at offsets `at` (groups, GROUP) and `group`.
    """
    total = tl.zeros(at.shape, tl.float32)
    for rank in tl.static_range(WORLD):
        # In 64 bits: of 2^31 elements and more, which fit into an H200, the last ranks' begin beyond 32.
        begin = tl.cast(groups, tl.int64) * rank
        value = load(values + begin * GROUP + at, there[:, None], MASKED).to(tl.float32)
        total += value * load(scales + begin + group, there, MASKED)[:, None]
    largest = tl.maximum(tl.max(tl.abs(total), 1), 1e-30)
    scale = largest / LARGEST
    scaled = total * (LARGEST / largest)[:, None]
    # Integers to the nearest, to even: the sum has no digits for a fraction.
    scaled = (scaled + 12582912.0) - 12582912.0 if INTEGER else on_e4m3(scaled)
    return scaled, scale, total - scaled * scale[:, None]


@triton.jit
def _requantize(  # type: ignore[no-untyped-def]  # Triton's types are its own
    values,
    scales,
    sums,
    sum_scales,
    lost,
    groups,
    WORLD: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Sums of WORLD quantized chunks of `groups` groups, quantized again, and what that loses."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    there = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scaled, scale, gone = _requantized(
        values, scales, groups, at, group, there, WORLD, LARGEST, INTEGER, GROUP, True
    )
    tl.store(sums + at, scaled.to(sums.dtype.element_ty), there[:, None])
    tl.store(sum_scales + group, scale, there)
    tl.store(lost + at, gone, there[:, None])


@triton.jit
def _pushed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    residual,
    out,
    rest,
    own,
    peers,
    groups,
    data,
    area,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PHASES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program p takes the same tiles of the `groups` groups of every rank's part, in every rank: only programs of
    one number wait for another.

    First a rank quantizes all parts, each into its slot in the memory of the rank that has the part. These meet.
    Then it adds up the slots of its own part and writes the sum, quantized again, to all; what that loses goes to
    the residual, which the same program has written. They meet again, and the others' sums are dequantized.
    Slots and sums are two areas at the same places for arrays of all sizes: one half is enough, for the reasons
    that `all_reduce._two_shot` gives.
    """
    call = begin(own)
    step = tl.num_programs(0) * GROUPS
    first = tl.program_id(0) * GROUPS
    # A rank's own part last: what goes over links is under way early.
    for turn in tl.static_range(1, WORLD + 1):
        peer = (RANK + turn) % WORLD
        slot = tl.cast(groups, tl.int64) * RANK
        values, scales = _area(peers, peer, data, groups, WORLD, INTEGER, GROUP)
        for start in range(first, groups, step):
            _send(
                x, residual, rest, values, scales, tl.cast(groups, tl.int64) * peer + start, slot + start,
                groups - start, LARGEST, INTEGER, GROUPS, GROUP,
            )  # fmt: skip
    meet(own, peers, call, 0, RANK, WORLD, PHASES, PROGRAMS)
    for start in range(first, groups, step):
        if start + GROUPS <= groups:
            _add(out, rest, peers, groups, start, data, area, RANK, WORLD, LARGEST, INTEGER, GROUPS, GROUP, False)
        else:
            _add(out, rest, peers, groups, start, data, area, RANK, WORLD, LARGEST, INTEGER, GROUPS, GROUP, True)
    meet(own, peers, call, 1, RANK, WORLD, PHASES, PROGRAMS)
    values, scales = _area(peers, RANK, data + area, groups, WORLD, INTEGER, GROUP)
    for turn in tl.static_range(1, WORLD):
        part = tl.cast(groups, tl.int64) * ((RANK + turn) % WORLD)
        for start in range(first, groups, step):
            _take(values, scales, out, part + start, groups - start, GROUPS, GROUP)
    end(own, call, PROGRAMS)


@triton.jit
def _area(  # type: ignore[no-untyped-def]  # Triton's types are its own
    peers, rank, begin, groups, WORLD: tl.constexpr, INTEGER: tl.constexpr, GROUP: tl.constexpr
):
    """Where a rank's values begin, and behind them their scales."""
    values = tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.int8)), 128) + begin
    scales = (values + tl.cast(groups, tl.int64) * (WORLD * GROUP)).to(tl.pointer_type(tl.float32))
    if INTEGER:
        return values, scales
    else:
        return values.to(tl.pointer_type(tl.float8e4nv)), scales


@triton.jit
def _offsets(GROUPS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of a tile's elements and groups, from where it begins."""
    group = tl.arange(0, GROUPS)
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], group


@triton.jit
def _send(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    residual,
    rest,
    values,
    scales,
    source,
    to,
    left,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Quantizes a tile from group `source` on, of which `left` groups are there, to group `to` of `values`. Only a
    last one masks: a mask would split 16-byte accesses.
    """
    at, group = _offsets(GROUPS, GROUP)
    x += source * GROUP
    residual += source * GROUP
    rest += source * GROUP
    values += to * GROUP
    scales += to
    size = left * GROUP
    if left >= GROUPS:
        quantized(x, residual, values, scales, rest, at, group, size, LARGEST, INTEGER, GROUP, False)
    else:
        quantized(x, residual, values, scales, rest, at, group, size, LARGEST, INTEGER, GROUP, True)


@triton.jit
def _add(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out,
    rest,
    peers,
    groups,
    start,
    data,
    area,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    LARGEST: tl.constexpr,
    INTEGER: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Sums of a tile of this rank's part, quantized again, to every rank; as they are, to `out`."""
    at, group = _offsets(GROUPS, GROUP)
    there = group < groups - start
    values, scales = _area(peers, RANK, data, groups, WORLD, INTEGER, GROUP)
    first = tl.cast(start, tl.int64)
    scaled, scale, gone = _requantized(
        values + first * GROUP, scales + first, groups, at, group, there, WORLD, LARGEST, INTEGER, GROUP, MASKED
    )
    first += tl.cast(groups, tl.int64) * RANK
    for turn in tl.static_range(1, WORLD):
        sums, sum_scales = _area(peers, (RANK + turn) % WORLD, data + area, groups, WORLD, INTEGER, GROUP)
        store(sums + first * GROUP + at, scaled.to(sums.dtype.element_ty), there[:, None], MASKED)
        store(sum_scales + first + group, scale, there, MASKED)
    rest += first * GROUP
    store(rest + at, load(rest + at, there[:, None], MASKED) + gone, there[:, None], MASKED)
    store(out + first * GROUP + at, (scaled * scale[:, None]).to(out.dtype.element_ty), there[:, None], MASKED)


@triton.jit
def _take(  # type: ignore[no-untyped-def]  # Triton's types are its own
    values, scales, out, begin, left, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """Dequantizes a tile from group `begin` on, of which `left` groups are there."""
    at, group = _offsets(GROUPS, GROUP)
    values += begin * GROUP
    scales += begin
    out += begin * GROUP
    if left >= GROUPS:
        dequantized(values, scales, out, at, group, left * GROUP, GROUP, False)
    else:
        dequantized(values, scales, out, at, group, left * GROUP, GROUP, True)
