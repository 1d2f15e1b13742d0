"""Dynamic quantization to 8-bit floats (arXiv 2209.05433), with scales of rows, 128 columns or rows, squares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Columns that share a scale with granularity block, rows with column, both with tile."""

STEP = {"e4m3": 2.0**-3, "e5m2": 2.0**-2}
"""Spacing of a format's numbers at 1."""

TURNED = {"both": ("block", "column"), "tile_both": ("tile", "tile")}
"""Of what is quantized as it is and transposed: its granularity, and the transpose's."""

TOLERANCE = Tolerance(norm=0.028, absolute=1e-4, relative=0.064)
"""Of e4m3 rounded to nearest: half a step is 2^-4 of a number at most, 0.025 of it in the root mean square.
Truncation gives twice as much and fails."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, N) in the case's dtype, what shares a scale, and the format to quantize to."""
    import torch

    M, N = case.axes["M"], case.axes["N"]
    return {
        "x": torch.randn(M, N, device=device, generator=generator, dtype=torch_dtype(case.dtype)),
        "granularity": str(case.options["granularity"]),
        "format": str(case.options["format"]),
    }


def reference(x: torch.Tensor, granularity: str, format: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x itself, which the quantized values times their scales should be as near to as the format allows; twice
    where the transpose is quantized too.
    """
    return (x.clone(), x.clone()) if granularity in TURNED else x.clone()


def groups(case: Case) -> int:
    """How many scales there are."""
    M, N = case.axes["M"], case.axes["N"]
    down, across = -(-M // BLOCK), -(-N // BLOCK)
    counts = {"row": M, "block": M * across, "tile": down * across, "column": down * N}
    counts |= {"both": counts["block"] + counts["column"], "tile_both": counts["tile"]}
    return counts[str(case.options["granularity"])]


def results(result: Any, inputs: Inputs) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """(q (M, N) in fp8, scale in fp32) to q · scale, (M, N) in fp64.

    scale is (M, 1) by row, (M, ceil(N/128)) by block and (ceil(M/128), ceil(N/128)) by tile. By column q is (N, M)
    and scale (N, ceil(M/128)): block of the transpose, which is turned back here. The deviation from x is given in
    steps of e4m3, so that one tolerance is right for both formats: e5m2 has half the numbers, and its deviation
    counts half. A wrong dtype or shape becomes NaN, which is wrong.

    Of "both" and "tile_both" it is two: of (q, scale), and of the transpose's.
    """
    inputs = {**inputs, "x": inputs["x"].double()}
    if (kinds := TURNED.get(inputs["granularity"])) is None:
        return _value(result, inputs)
    own, turned = ({**inputs, "granularity": kind} for kind in kinds)
    if kinds[1] == "column":  # which turns what it is given
        return _value(result[:2], own), _value(result[2:], turned)
    return _value(result[:2], own), _value(result[2:], {**turned, "x": inputs["x"].t()}).t()


def _value(result: Any, inputs: Inputs) -> torch.Tensor:
    """Of one pair of values and scales."""
    import torch

    q, scale = result
    x = inputs["x"]
    if inputs["granularity"] == "column":
        return _value(result, {**inputs, "x": x.t(), "granularity": "block"}).t()
    M, N = x.shape
    down = -(-M // BLOCK) if inputs["granularity"] == "tile" else M
    across = 1 if inputs["granularity"] == "row" else -(-N // BLOCK)
    if q.dtype != torch_dtype(inputs["format"]) or q.shape != x.shape or scale.numel() != down * across:
        return torch.full_like(x, torch.nan)
    wide = scale.double().reshape(down, across)
    if inputs["granularity"] != "row":
        wide = wide.repeat_interleave(BLOCK, -1)[:, :N]
    if inputs["granularity"] == "tile":
        wide = wide.repeat_interleave(BLOCK, 0)[:M]
    comparable: torch.Tensor = x + (q.double() * wide - x) * (STEP["e4m3"] / STEP[inputs["format"]])
    return comparable


def bytes_(case: Case) -> int:
    """Reads x, writes one byte an element, or two with the transpose, and the fp32 scales."""
    M, N = case.axes["M"], case.axes["N"]
    written = 2 if case.options["granularity"] in TURNED else 1
    return M * N * (BYTES[case.dtype] + written) + groups(case) * 4


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


def clone(x: torch.Tensor, granularity: str, format: str) -> torch.Tensor:
    """A plain copy of x, for scale."""
    return x.clone()


OPERATOR = Operator(
    name="fp8_quant",
    summary="dynamic quantization to 8-bit floats with scales",
    axes={"M": "tokens", "N": "width"},
    options={
        "granularity": ("row", "block", "tile", "column", "both", "tile_both"),
        "format": ("e4m3", "e5m2"),
    },
    inputs=inputs,
    reference=reference,
    results=results,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    tolerances=dict.fromkeys(("bf16", "fp16", "fp32"), TOLERANCE),
    yardsticks={"clone": clone},
    plans={
        "quick": (grid("forward", M=4096, N=4096),),
        "quick_cpu": (grid("forward", M=256, N=4096, dtypes="fp32"),),
        "standard": (
            grid(
                "forward",
                M=[4096, 16384],
                N=4096,
                options={"granularity": ["row", "block"], "format": ["e4m3", "e5m2"]},
            ),
            grid("forward", M=16384, N=4096, options={"granularity": ["tile", "column", "both", "tile_both"]}),
        ),
        "full": (
            grid(
                "forward",
                M=16384,
                N=4096,
                options={"granularity": ["row", "block"]},
                dtypes=["fp16", "fp32"],
            ),
            grid(
                "forward",
                M=[1, 4095],
                N=4095,
                options={"granularity": ["row", "block", "tile", "column", "both", "tile_both"]},
            ),
            grid("forward", M=2048, N=65536, options={"granularity": ["row", "block"]}),
        ),
    },
)
