"""The way back from `gradient_compression`: a payload to a dense gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype
from .gradient_compression import CHUNK, GROUP, KEEP, payload_bytes, unpacked

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """A payload in the layout of `gradient_compression`, and the size, dtype, scheme and keep that it has."""
    import torch

    N, scheme, dtype = case.axes["N"], str(case.options["scheme"]), torch_dtype(case.dtype)
    if scheme == "topk":
        chunks, width = -(-N // CHUNK), CHUNK // KEEP
        values = torch.randn(chunks, KEEP, device=device, generator=generator, dtype=dtype)
        places = torch.randint(width, (chunks, KEEP), device=device, generator=generator)
        places += torch.arange(0, CHUNK, width, device=device)
        second = places.to(torch.int16)
    else:
        groups = -(-N // GROUP)
        values = torch.randn(groups * GROUP, device=device, generator=generator, dtype=torch.float32)
        values = (values * 30).clamp(-127, 127).round().to(torch.int8 if scheme == "int8" else torch.float8_e4m3fn)
        second = torch.rand(groups, device=device, generator=generator) + 0.5
    payload = torch.cat([x.flatten().view(torch.uint8) for x in (values, second)])
    return {"payload": payload, "size": N, "dtype": dtype, "scheme": scheme, "keep": KEEP}


def reference(payload: torch.Tensor, size: int, dtype: torch.dtype, scheme: str, keep: int) -> torch.Tensor:
    """value = byte · scale, or the values at their places and 0 elsewhere, (size,)."""
    import torch

    return unpacked(payload, size, dtype, scheme, keep, torch.float64 if size <= 1 << 26 else torch.float32)


def bytes_(case: Case) -> int:
    """Reads the payload, writes the gradient."""
    N, element = case.axes["N"], BYTES[case.dtype]
    return N * element + payload_bytes(N, str(case.options["scheme"]), KEEP, element)


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="gradient_decompression",
    summary="a compressed gradient made dense again",
    axes={"N": "elements"},
    options={"scheme": ("int8", "fp8", "topk")},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    plans={
        "quick": (grid("forward", N=1 << 24),),
        "quick_cpu": (grid("forward", N=1 << 20, dtypes="fp32"),),
        "standard": (grid("forward", N=1 << 26, options={"scheme": ["int8", "topk"]}),),
        "full": (
            grid("forward", N=1 << 26, options={"scheme": "fp8"}),
            grid("forward", N=12_345_677, options={"scheme": ["int8", "fp8", "topk"]}, dtypes=["bf16", "fp32"]),
        ),
    },
)
