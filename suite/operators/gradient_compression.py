"""Compression of a gradient before it is sent, with error feedback: what is lost goes into the next step's.

Seide et al. 2014 (1-bit SGD) and Stich et al. (arXiv 1809.07599, top-k with memory). The payload is what one
collective would send; its layout is part of the operator, so that `gradient_decompression` reads everyone's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

GROUP = 128
"""Elements that share a scale."""

CHUNK = 1024
"""Elements that top-k chooses among."""

KEEP = 8
"""How many it keeps."""

TOLERANCE = Tolerance(norm=0.031, absolute=0.1, relative=0.064)
"""Of e4m3 and of int8, rounded to nearest. Half a step of e4m3 is 2^-4 of a number at most, 0.025 of it in the
root mean square; of int8 it is up to 0.018 of a normal distribution's deviation, and counts 3.5 times."""

STEPS = {"int8": 3.5, "fp8": 1.0}
"""What a deviation counts for in that tolerance."""

EXACT = {"bf16": 4.0, "fp16": 32.0, "fp32": 1e5}
"""What deviations count for where nothing but rounding to the dtype is allowed."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """gradient and residual (N,) in the case's dtype, the scheme, and how many of 1024 top-k keeps."""
    import torch

    def normal(scale: float) -> torch.Tensor:
        N, dtype = case.axes["N"], torch_dtype(case.dtype)
        return torch.randn(N, device=device, generator=generator, dtype=dtype).mul_(scale)

    return {
        "gradient": normal(1.0),
        "residual": normal(0.5),
        "scheme": str(case.options["scheme"]),
        "keep": KEEP,
    }


def reference(
    gradient: torch.Tensor, residual: torch.Tensor, scheme: str, keep: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """gradient + residual, which payload and new residual make up together, and what the payload should tell.

    That is the sum again where it is quantized, and of top-k the largest magnitudes of each chunk, largest first.
    """
    import torch

    total = gradient + residual
    if scheme != "topk":
        return total, total.clone()
    chunks = torch.nn.functional.pad(total.abs(), (0, -total.numel() % CHUNK)).view(-1, CHUNK)
    return total, chunks.topk(keep, -1).values


def results(result: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """(payload, new residual) to what the reference gives, deviations weighed so that one tolerance is right.

    A payload or a residual of another size or dtype gives nothing, which is wrong.
    """
    import torch

    payload, rest = result
    gradient, scheme, keep = inputs["gradient"], inputs["scheme"], inputs["keep"]
    N = gradient.numel()
    if payload.dtype != torch.uint8 or payload.numel() != payload_bytes(N, scheme, keep, gradient.element_size()):
        return ()
    if rest.shape != gradient.shape or rest.dtype != inputs["residual"].dtype:
        return ()
    wide = torch.float64 if N <= 1 << 24 else torch.float32
    sent = unpacked(payload, N, gradient.dtype, scheme, keep, wide)
    total, told = reference(gradient.to(wide), inputs["residual"].to(wide), scheme, keep)
    exact = EXACT[next(name for name in EXACT if torch_dtype(name) == gradient.dtype)]
    whole = total + (sent + rest.to(wide) - total) * exact
    if scheme == "topk":
        return whole, told + (reference(sent, torch.zeros_like(sent), scheme, keep)[1] - told) * exact
    return whole, total + (sent - total) * STEPS[scheme]


def payload_bytes(size: int, scheme: str, keep: int, element: int) -> int:
    """Bytes of the payload of `size` elements of `element` bytes.

    int8 and fp8: a byte an element, in whole groups of 128, and an fp32 scale a group. topk: `keep` values and
    as many 16-bit places for each 1024 elements.
    """
    if scheme == "topk":
        return -(-size // CHUNK) * keep * (element + 2)
    return -(-size // GROUP) * (GROUP + 4)


def unpacked(
    payload: torch.Tensor, size: int, dtype: torch.dtype, scheme: str, keep: int, wide: torch.dtype
) -> torch.Tensor:
    """The gradient that a payload stands for, (size,) in the dtype `wide`.

    int8 and fp8 (e4m3): all bytes, then all scales; value = byte · scale. topk: all values in `dtype`, then all
    places in their chunks; places beyond the end stand for nothing.
    """
    import torch

    if scheme != "topk":
        middle = -(-size // GROUP) * GROUP
        kind = torch.int8 if scheme == "int8" else torch.float8_e4m3fn
        scales = payload[middle:].view(torch.float32).to(wide)
        return (payload[:middle].view(kind).view(-1, GROUP).to(wide) * scales[:, None]).view(-1)[:size]
    chunks = -(-size // CHUNK)
    middle = chunks * keep * dtype.itemsize
    values = payload[:middle].view(dtype).view(chunks, keep).to(wide)
    places = payload[middle:].view(torch.int16).view(chunks, keep).long()
    dense = torch.zeros(chunks, CHUNK, dtype=wide, device=payload.device)
    return dense.scatter_(1, places.clamp(0, CHUNK - 1), values).view(-1)[:size]


def bytes_(case: Case) -> int:
    """Reads gradient and residual, writes residual and payload."""
    N, element = case.axes["N"], BYTES[case.dtype]
    return 3 * N * element + payload_bytes(N, str(case.options["scheme"]), KEEP, element)


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="gradient_compression",
    summary="compression of a gradient with error feedback",
    axes={"N": "elements"},
    options={"scheme": ("int8", "fp8", "topk")},
    inputs=inputs,
    reference=reference,
    results=results,
    bytes=bytes_,
    flops=flops,
    tolerances=dict.fromkeys(("bf16", "fp16", "fp32"), TOLERANCE),
    plans={
        "quick": (grid("forward", N=1 << 24, options={"scheme": ["int8", "topk"]}),),
        "quick_cpu": (grid("forward", N=1 << 20, dtypes="fp32"),),
        "standard": (
            grid("forward", N=1 << 26, options={"scheme": ["int8", "fp8", "topk"]}),
            grid("forward", N=1 << 20, options={"scheme": ["int8", "topk"]}),
        ),
        "full": (
            grid("forward", N=1 << 26, options={"scheme": ["int8", "fp8", "topk"]}, dtypes=["fp16", "fp32"]),
            grid("forward", N=12_345_677, options={"scheme": ["int8", "fp8", "topk"]}),
        ),
    },
)
