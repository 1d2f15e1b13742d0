"""All-reduce of gradients in 8 bits with error feedback: half a byte's worth of bf16 on the wire.

The array and what earlier calls lost are added up and rounded to int8, or to E4M3 (`fp8`), with an fp32 scale
for each 128 elements (`gradient_compression`). Rank r gets the r-th chunk of all ranks, adds them up in fp32,
rounds the sum in the same way and sends it to all. What the first rounding lost is the new residual; what the
second lost is in the r-th chunk of rank r's residual too, so that nothing is lost for good: over steps the sums
are those of exact gradients.

Sent: 2·S·(n-1)/n · 33/64 bytes of bf16's, against 2·S·(n-1)/n.
Over NVLink between two H200 rounding to int8 takes longer than that saves: this is for slower links. E4M3 was not
run on GPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, check, choice, on_e4m3
from ..quantization.gradient_compression import GROUP, LARGEST, gradient_compression, sections
from ..quantization.gradient_decompression import gradient_decompression

GROUPS = 4 if INTERPRETED else 16
"""Groups of a program."""


def all_reduce_quantized(
    x: torch.Tensor, residual: torch.Tensor, scheme: str = "int8"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over ranks of x + residual, new residual), both like `x`.

    x (N,) in bf16, fp16 or fp32, N a multiple of 128 · world, the same in all ranks of the default process group;
    residual fp32 (N,): zeros at first, then what the last call gave; scheme "int8" or "fp8", of E4M3, the same in
    all ranks. Every rank must call it. Raises TypeError for a wrong dtype, ValueError for a wrong shape or scheme,
    NotImplementedError for E4M3 on a GPU without it.
    """
    check("x", x, dim=1)
    check("residual", residual, dtypes=(torch.float32,), shape=x.shape, like=x)
    choice("scheme", scheme, ("int8", "fp8"))
    world, rank = dist.get_world_size(), dist.get_rank()
    N = x.numel()
    if N % (GROUP * world):
        raise ValueError(f"x has {N} elements, expected a multiple of {GROUP} for each of {world} ranks")
    payload, rest = gradient_compression(x, residual, scheme)
    values, scales = sections(payload, N, scheme, 1, x.dtype)
    theirs, their_scales = torch.empty_like(values), torch.empty_like(scales)
    dist.all_to_all_single(_bytes(theirs), _bytes(values))
    dist.all_to_all_single(their_scales, scales)
    chunk = N // world
    sums, sum_scales, lost = values.new_empty(chunk), scales.new_empty(chunk // GROUP), rest.new_empty(chunk)
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


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """As groups of processes take them, not all of which know E4M3."""
    return values.view(torch.uint8)


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
    inside = there[:, None]
    total = tl.zeros([GROUPS, GROUP], tl.float32)
    for rank in tl.static_range(WORLD):
        # In 64 bits: of 2^31 elements and more, which fit into an H200, the last ranks' begin beyond 32.
        value = tl.load(values + tl.cast(groups, tl.int64) * (rank * GROUP) + at, inside, 0.0).to(tl.float32)
        total += value * tl.load(scales + rank * groups + group, there, 0.0)[:, None]
    largest = tl.maximum(tl.max(tl.abs(total), 1), 1e-30)
    scale = largest / LARGEST
    scaled = total * (LARGEST / largest)[:, None]
    if INTEGER:
        # To the nearest, to even: the sum has no digits for a fraction.
        scaled = (scaled + 12582912.0) - 12582912.0
        tl.store(sums + at, scaled.to(tl.int8), inside)
    else:
        scaled = on_e4m3(scaled)
        tl.store(sums + at, scaled.to(sums.dtype.element_ty), inside)
    tl.store(sum_scales + group, scale, there)
    tl.store(lost + at, total - scaled * scale[:, None], inside)
