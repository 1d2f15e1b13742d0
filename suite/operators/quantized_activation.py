"""RMSNorm or SwiGLU that writes 8-bit floats (E4M3) with a scale for 128 columns, as the product after it reads
them.

What it costs to quantize in the same kernel is seen beside `rms_norm` and `swiglu` of the same size, which write
16-bit numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid, torch_dtype
from ._accuracy import with_outliers

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Columns that share a scale."""

TOLERANCE = Tolerance(norm=0.028, absolute=1e-3, relative=0.068)
"""As of `fp8_quant` to E4M3, and bf16's rounding for who computes the activation before."""


EPS = 0.1
"""The norm's: large, beside a mean square of about 1, so that its absence or another place of it shows."""


def drawn(
    case: Case, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x (M, K) and the norm's weight (K,), or gate and up side by side (M, 2K) and None, in the case's dtype.

    With data "outliers" one column in a hundred is 30 times as large.
    """
    import torch

    M, K = case.axes["M"], case.axes["K"]
    norm = case.options["activation"] == "rms_norm"
    dtype = torch_dtype(case.dtype)
    x = torch.randn(M, K if norm else 2 * K, device=device, generator=generator, dtype=dtype)
    if case.options["data"] == "outliers":
        with_outliers(x)
    if not norm:
        return x, None
    return x, torch.randn(K, device=device, generator=generator, dtype=dtype) * 0.1 + 1


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, K) with the norm's weight (K,) and its epsilon, or gate and up side by side (M, 2K) with None."""
    x, weight = drawn(case, device, generator)
    return {"x": x, "norm_weight": weight, "eps": EPS}


def reference(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467) by the weight, or without one silu(gate) · up."""
    import torch

    if norm_weight is None:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_weight


def results(result: Any, inputs: Inputs) -> torch.Tensor:
    """(q (M, K) in E4M3, scale (M, ⌈K / 128⌉) in fp32) to q · scale; a wrong dtype or shape becomes NaN."""
    import torch

    q, scale = result
    M, width = inputs["x"].shape
    K = width if inputs["norm_weight"] is not None else width // 2
    if q.shape != (M, K) or scale.shape != (M, -(-K // BLOCK)) or q.dtype != torch.float8_e4m3fn:
        return torch.full((M, K), torch.nan, device=inputs["x"].device)
    numbers: torch.Tensor = q.double() * scale.double().repeat_interleave(BLOCK, 1)[:, :K]
    return numbers


def bytes_(case: Case) -> int:
    """Reads x and the norm's weight, writes a byte a number and the scales."""
    M, K = case.axes["M"], case.axes["K"]
    norm = case.options["activation"] == "rms_norm"
    given = (M * K + K if norm else 2 * M * K) * BYTES[case.dtype]
    return given + M * K + M * -(-K // BLOCK) * BYTES["fp32"]


def flops(case: Case) -> int:
    """No product: bound by memory."""
    return 0


ACTIVATIONS: dict[str, Option | list[Option]] = {"activation": ["rms_norm", "swiglu"]}

OPERATOR = Operator(
    name="quantized_activation",
    summary="RMSNorm or SwiGLU that writes E4M3 with a scale for 128 columns",
    axes={"M": "tokens", "K": "width"},
    options={"activation": ("rms_norm", "swiglu"), "data": ("normal", "outliers")},
    inputs=inputs,
    reference=reference,
    results=results,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("bf16", "fp16"),
    tolerances=dict.fromkeys(("bf16", "fp16"), TOLERANCE),
    # Epsilon became large: nothing else is drawn or computed.
    continues={
        "d54ebd076f65": "5ac609a3ea9f",
    },
    plans={
        "quick": (grid("forward", M=4096, K=4096),),
        "quick_cpu": (grid("forward", M=64, K=1024),),
        "standard": (
            grid("forward", M=[64, 8192], K=4096, options=ACTIVATIONS),
            grid("forward", M=8192, K=[2880, 14336], options=ACTIVATIONS),
        ),
        "full": (
            grid("forward", M=[1, 4095], K=2880, options=ACTIVATIONS | {"data": ["normal", "outliers"]}),
            grid("forward", M=1000, K=[1001, 20000], options=ACTIVATIONS, dtypes=["bf16", "fp16"]),
        ),
    },
)
