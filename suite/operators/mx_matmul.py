"""Products of inputs in bf16 or E4M3 with weights in MXFP8, MXFP4 (OCP Microscaling 1.0, arXiv 2310.10537) or
NVFP4.

Weights are quantized before: that is outside of what is timed. The numbers of these formats are exact in bf16, so
`error` is against the exact product with the quantized weight; what the format costs is said by
`error_unquantized`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, TOLERANCES, Inputs, Operator, Option, grid
from ._accuracy import SATURATED, UNDERFLOWED, WEIGHT_BYTES, with_outliers
from .fp8_matmul import scaled

if TYPE_CHECKING:
    import torch

GROUP = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Columns that share a scale."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1, by code."""

LARGEST = {"mxfp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}
"""Largest number of the elements' format."""


def original(case: Case, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) and the weight (N, K) in bf16: what `inputs` quantizes when it gets the same generator. With data
    "outliers" one column of x, and one of the weight, in a hundred is 30 times as large.
    """
    import torch

    M, N, K = (case.axes[axis] for axis in "MNK")
    x = torch.randn(M, K, device=device, generator=generator, dtype=torch.bfloat16)
    weight = torch.randn(N, K, device=device, generator=generator, dtype=torch.bfloat16).mul_(K**-0.5)
    if case.options["data"] == "outliers":
        x, weight = with_outliers(x), with_outliers(weight)
    return x, weight


def quantized(weight: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(q, scales, scale of the tensor or None) of a weight (N, K), K even, by the formats' own rules.

    MX scales are powers of two, floor(log2(largest)) less the format's largest exponent, as bytes; NVFP4's are
    E4M3.
    """
    import torch

    N, K = weight.shape
    group = GROUP[format]
    across = -(-K // group)
    wide = torch.nn.functional.pad(weight.float(), (0, across * group - K)).view(N, across, group)
    largest = wide.abs().amax(-1)
    whole = None
    if format == "nvfp4":
        whole = largest.amax().clamp(min=1e-30) / (448.0 * 6.0)
        scales = (largest / (6.0 * whole)).clamp(max=448.0).to(torch.float8_e4m3fn)
        factors = scales.float() * whole
    else:
        exponent = torch.frexp(largest.clamp(min=2.0**-126))[1] - 1 - (8 if format == "mxfp8" else 2)
        exponent = exponent.clamp(min=-127)
        scales = (exponent + 127).to(torch.uint8)
        factors = torch.exp2(exponent.float())
    limit = LARGEST[format]
    y = torch.where(factors[..., None] == 0, 0.0, wide / factors[..., None]).clamp(-limit, limit)
    y = y.view(N, -1)[:, :K].contiguous()
    if format == "mxfp8":
        return y.to(torch.float8_e4m3fn), scales, whole
    # Halfway between two numbers: the one with the even code.
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    size = y.abs()
    code = torch.bucketize(size, middles)
    ties = (size == middles[code.clamp(max=6)]) & (code % 2 == 1) & (code < 7)
    code = (code + ties.to(code.dtype)) | (y.signbit().to(code.dtype) << 3)
    packed = code[:, ::2] | (code[:, 1::2] << 4)
    return packed.to(torch.uint8), scales, whole


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, K) in bf16, or in E4M3 with `scale_x` (M, ⌈K / 128⌉) in fp32 (else None); the weight's q, E4M3 (N, K)
    or bytes (N, K/2), its scales, bytes (N, ⌈K / 32⌉) or E4M3 (N, ⌈K / 16⌉); the format, and nvfp4's fp32 scale
    of the whole tensor (else None).
    """
    x, weight = original(case, device, generator)
    format = str(case.options["format"])
    q, scales, scale = quantized(weight, format)
    scale_x = None
    if case.dtype == "e4m3":
        x, scale_x = scaled(x, 1, 128)
    return {"x": x, "q": q, "scales": scales, "format": format, "scale": scale, "scale_x": scale_x}


def dequantized(
    q: torch.Tensor, scales: torch.Tensor, format: str, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The weight (N, K) that q and scales stand for; each may have been raised to another dtype before."""
    import torch

    if format == "mxfp8":
        elements = q.to(dtype)
    else:
        magnitudes = torch.tensor(MAGNITUDES, dtype=dtype, device=q.device)
        codes = q.to(torch.int32)
        elements = torch.cat((magnitudes, -magnitudes))[torch.stack((codes & 15, codes >> 4), -1)].flatten(1)
    factors = scales.to(dtype) if format == "nvfp4" else torch.exp2(scales.to(dtype) - 127)
    wide = elements * factors.repeat_interleave(GROUP[format], -1)[:, : elements.shape[1]]
    return wide if scale is None else wide * scale


def reference(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    format: str,
    scale: torch.Tensor | None,
    scale_x: torch.Tensor | None,
) -> torch.Tensor:
    """x @ weight.T with the x and the weight that numbers and scales stand for."""
    if scale_x is not None:
        x = x * scale_x.repeat_interleave(128, 1)[:, : x.shape[1]]
    return x @ dequantized(q, scales, format, scale, x.dtype).T


def unquantized(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """x @ weight.T before they were quantized."""
    x, weight = original(case, device, generator)
    return x.double() @ weight.double().T


def _magnitudes(inputs: Inputs) -> torch.Tensor:
    """Of the weight's numbers before their scales; of E2M1 by code, of which 7 is the largest."""
    import torch

    q: torch.Tensor = inputs["q"]
    if inputs["format"] == "mxfp8":
        return q.float().abs()
    return torch.stack((q & 7, q >> 4 & 7))


def saturated(outputs: list[torch.Tensor], references: list[torch.Tensor], inputs: Inputs) -> float:
    """The share of the weight's numbers that are the largest of their format."""
    largest = LARGEST["mxfp8"] if inputs["format"] == "mxfp8" else 7
    return float((_magnitudes(inputs) == largest).double().mean())


def underflowed(outputs: list[torch.Tensor], references: list[torch.Tensor], inputs: Inputs) -> float:
    """The share of the weight's numbers that are 0."""
    return float((_magnitudes(inputs) == 0).double().mean())


def weight_bytes(outputs: list[torch.Tensor], references: list[torch.Tensor], inputs: Inputs) -> float:
    """Bytes of the weight's codes and scales a number of the weight."""
    q, scales = inputs["q"], inputs["scales"]
    numbers = q.numel() * (1 if inputs["format"] == "mxfp8" else 2)
    taken: float = (q.numel() * q.element_size() + scales.numel() * scales.element_size()) / max(1, numbers)
    return taken


def bytes_(case: Case) -> int:
    """Reads x and its scales, the weight's numbers and scales; writes the product."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    format = str(case.options["format"])
    weight = N * ((K if format == "mxfp8" else K // 2) + -(-K // GROUP[format]))
    given = M * -(-K // 128) * BYTES["fp32"] if case.dtype == "e4m3" else 0
    return weight + M * K * BYTES[case.dtype] + given + M * N * BYTES["bf16"]


def flops(case: Case) -> int:
    """Two a number of the product times K."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return 2 * M * N * K


FORMATS: dict[str, Option | list[Option]] = {"format": ["mxfp4", "mxfp8", "nvfp4"]}

OPERATOR = Operator(
    name="mx_matmul",
    summary="matrix product of bf16 or E4M3 inputs with MXFP8, MXFP4 or NVFP4 weights",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the input"},
    options={"format": ("mxfp4", "mxfp8", "nvfp4"), "data": ("normal", "outliers")},
    inputs=inputs,
    reference=reference,
    weights=("q", "scales"),
    unquantized=unquantized,
    measures={SATURATED: saturated, UNDERFLOWED: underflowed, WEIGHT_BYTES: weight_bytes},
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("bf16", "e4m3"),
    tolerances=dict.fromkeys(("bf16", "e4m3"), TOLERANCES["bf16"]),
    plans={
        "quick": (grid("forward", M=[16, 4096], N=4096, K=4096),),
        "quick_cpu": (grid("forward", M=16, N=256, K=320),),
        "standard": (
            grid("forward", M=[1, 16], N=16384, K=8192, options=FORMATS),
            grid("forward", M=[64, 1024, 4096], N=16384, K=8192),
            grid("forward", M=[16, 4096], N=5760, K=2880),
            grid("forward", M=[1024, 4096], N=16384, K=8192, dtypes="e4m3"),
        ),
        "full": (
            grid("forward", M=[4, 32, 256], N=16384, K=8192, options=FORMATS),
            grid("forward", M=[1, 100, 4095], N=2880, K=2880, options=FORMATS),
            grid("forward", M=256, N=4096, K=7168, options=FORMATS | {"data": "outliers"}),
            grid("forward", M=[7, 1000], N=1001, K=1006, options=FORMATS),
        ),
    },
)
