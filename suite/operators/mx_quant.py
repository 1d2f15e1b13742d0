"""Quantization to MXFP8 and MXFP4 (OCP Microscaling 1.0, arXiv 2310.10537) and NVFP4 (arXiv 2509.25149)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

GROUP = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Columns that share a scale."""

STEP = {"mxfp8": 2.0**-3, "mxfp4": 2.0**-1, "nvfp4": 2.0**-1}
"""Spacing of the elements' numbers at 1."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1, by code."""

TOLERANCE = Tolerance(norm=0.034, absolute=0.08, relative=0.13)
"""In steps of E4M3. Rounding to nearest comes to 0.024 to 0.032 of normal numbers, where the specification's scale
lets the largest of a group be cut off; truncation to more than 0.045. A number may be off by half a step of the
smallest in its group, or by as much as the cut takes from one just below a power of two: 1/8 of it."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, N) in the case's dtype, the format, and nvfp4's fp32 scale of the whole tensor (else None)."""
    import torch

    M, N = case.axes["M"], case.axes["N"]
    x = torch.randn(M, N, device=device, generator=generator, dtype=torch_dtype(case.dtype))
    scale = x.abs().amax().float() / (448 * 6) if case.options["format"] == "nvfp4" else None
    return {"x": x, "format": str(case.options["format"]), "scale": scale}


def reference(x: torch.Tensor, format: str, scale: torch.Tensor | None) -> torch.Tensor:
    """x itself, which the elements times their scales should be as near to as the format allows."""
    return x.clone()


def results(result: Any, inputs: Inputs) -> torch.Tensor:
    """(q, scales) to the numbers they stand for, (M, N) in fp64, their deviation from x in steps of E4M3.

    q is float8_e4m3fn (M, N) for mxfp8, else bytes (M, ceil(N/2)) with the lower column in the lower four bits;
    scales are bytes (M, ceil(N/32)) that stand for 2^(byte - 127), or float8_e4m3fn (M, ceil(N/16)) for nvfp4. A
    wrong dtype or shape becomes NaN, which is wrong.
    """
    import torch

    q, scales = result
    x, format = inputs["x"].double(), inputs["format"]
    M, N = x.shape
    shape = (M, N if format == "mxfp8" else -(-N // 2))
    across = -(-N // GROUP[format])
    wrong = q.shape != shape or scales.shape != (M, across) or q.itemsize != 1 or scales.itemsize != 1
    wrong |= format == "mxfp8" and q.dtype != torch.float8_e4m3fn
    wrong |= format == "nvfp4" and scales.dtype != torch.float8_e4m3fn
    if wrong:
        return torch.full_like(x, torch.nan)
    if format == "mxfp8":
        elements = q.double()
    else:
        magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float64, device=x.device)
        codes = q.view(torch.uint8).to(torch.int32)
        elements = torch.cat((magnitudes, -magnitudes))[torch.stack((codes & 15, codes >> 4), -1)].flatten(1)[
            :, :N
        ]
    if format == "nvfp4":
        factors = scales.double() * inputs["scale"].double()
    else:
        powers = scales.view(torch.uint8).double()
        factors = torch.where(powers == 255, torch.nan, torch.exp2(powers - 127))
    wide = factors.repeat_interleave(GROUP[format], -1)[:, :N]
    comparable: torch.Tensor = x + (elements * wide - x) * (STEP["mxfp8"] / STEP[format])
    return comparable


def bytes_(case: Case) -> int:
    """Reads x, writes one byte or half of one an element and one byte a scale."""
    M, N = case.axes["M"], case.axes["N"]
    format = str(case.options["format"])
    return M * (N * BYTES[case.dtype] + (N if format == "mxfp8" else -(-N // 2)) + -(-N // GROUP[format]))


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="mx_quant",
    summary="quantization to MXFP8, MXFP4 or NVFP4, packed, with scales",
    axes={"M": "tokens", "N": "width"},
    options={"format": ("mxfp8", "mxfp4", "nvfp4")},
    inputs=inputs,
    reference=reference,
    results=results,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    tolerances=dict.fromkeys(("bf16", "fp16", "fp32"), TOLERANCE),
    plans={
        "quick": (grid("forward", M=4096, N=4096, options={"format": ["mxfp8", "nvfp4"]}),),
        "quick_cpu": (grid("forward", M=256, N=4096, dtypes="fp32"),),
        "standard": (
            grid("forward", M=[4096, 16384], N=4096, options={"format": ["mxfp8", "mxfp4", "nvfp4"]}),
            grid("forward", M=16384, N=4096, options={"format": "mxfp4"}, dtypes="fp32"),
        ),
        "full": (
            grid(
                "forward",
                M=[1, 4095],
                N=4094,
                options={"format": ["mxfp8", "mxfp4", "nvfp4"]},
                dtypes=["bf16", "fp16", "fp32"],
            ),
            grid("forward", M=2048, N=65536, options={"format": ["mxfp8", "mxfp4", "nvfp4"]}),
        ),
    },
)
