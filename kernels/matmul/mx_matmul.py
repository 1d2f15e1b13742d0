"""Matrix products with weights in MXFP8, MXFP4 or NVFP4 and inputs in bf16, or with MXFP4 and inputs in E4M3."""

from __future__ import annotations

import torch

from .._common import capability, check, choice, needs_e4m3, operator
from . import _few_rows_mx as few_rows
from . import _mx as portable
from .fp8_matmul import fp8_matmul
from .matmul import matmul

FEW = few_rows.MOST
"""Rows of x up to which weights are widened on their way to the matrix units. Otherwise they are before: that
costs memory for them in bf16, and the time to write and read it."""

_WEIGHTS = {
    "mxfp8": (torch.float8_e4m3fn,),
    "mxfp4": (torch.float4_e2m1fn_x2, torch.uint8),
    "nvfp4": (torch.float4_e2m1fn_x2, torch.uint8),
}
_SCALES = {
    "mxfp8": (torch.float8_e8m0fnu, torch.uint8),
    "mxfp4": (torch.float8_e8m0fnu, torch.uint8),
    "nvfp4": (torch.float8_e4m3fn,),
}


def mx_matmul(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    format: str = "mxfp4",
    scale: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T in bf16 of x (M, K) in bf16 and a weight (N, K) that `mx_quant` has made q and scales of.

    q is float8_e4m3fn (N, K) for "mxfp8", else float4_e2m1fn_x2 or bytes (N, K/2) with the lower column in the
    lower four bits; scales are float8_e8m0fnu or bytes (N, ⌈K / 32⌉), for "nvfp4" float8_e4m3fn (N, ⌈K / 16⌉)
    beside one fp32 `scale`. K is even. The weights' numbers are multiplied exactly, sums are fp32.

    Hopper multiplies none of these formats in hardware: weights are widened to bf16. There, with at most 64 rows,
    MXFP4's scales may be 2^7 at most; of larger ones come NaN.

    x in float8_e4m3fn is multiplied at the rate of 8-bit numbers, for "mxfp4" alone: `scale_x`, fp32 (M, ⌈K /
    128⌉), belongs to it, and each call re-encodes the weights as E4M3 with a scale for 128 × 128 of them. That is
    exact where the scales in such a block are within 2^14 of each other.
    Not differentiable.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or format, NotImplementedError
    for x in float8_e4m3fn with another format than "mxfp4", and on GPUs that do not convert to E4M3 where numbers
    are E4M3; the message names the argument.
    """
    choice("format", format, tuple(portable.GROUPS))
    check("x", x, dim=2, dtypes=(torch.bfloat16, torch.float8_e4m3fn))
    K = x.shape[1]
    if K % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected an even number of columns")
    check("q", q, dim=2, like=x, dtypes=_WEIGHTS[format])
    check("q", q, shape=(q.shape[0], K if format == "mxfp8" else K // 2), dtypes=_WEIGHTS[format])
    across = -(-K // portable.GROUPS[format])
    check("scales", scales, shape=(q.shape[0], across), like=x, dtypes=_SCALES[format])
    if format == "nvfp4":
        check("scale", scale, like=x, dtypes=(torch.float32,))
        if scale is not None and scale.numel() != 1:
            raise ValueError(f"scale has shape {tuple(scale.shape)}, expected one number")
    elif scale is not None:
        raise ValueError(f"scale is given, but {format} has none")
    if x.dtype == torch.float8_e4m3fn:
        if format != "mxfp4":
            raise NotImplementedError(
                f"x in float8_e4m3fn is multiplied with mxfp4, which E4M3 holds; {format} is not re-encoded"
            )
        check("scale_x", scale_x, shape=(x.shape[0], -(-K // 128)), like=x, dtypes=(torch.float32,))
    elif scale_x is not None:
        raise ValueError("scale_x is given, but x is bf16")
    # Triton has no name for the dtypes of packed numbers and of powers.
    if format != "mxfp8":
        q = q.view(torch.uint8)
    if format != "nvfp4":
        scales = scales.view(torch.uint8)
    result: torch.Tensor = _mx_matmul(x, q, scales, format, scale, scale_x)
    return result


def _empty(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    format: str,
    scale: torch.Tensor | None,
    scale_x: torch.Tensor | None,
) -> torch.Tensor:
    return torch.empty(x.shape[0], q.shape[0], dtype=torch.bfloat16, device=x.device)


def _launch(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    format: str,
    scale: torch.Tensor | None,
    scale_x: torch.Tensor | None,
) -> torch.Tensor:
    out = _empty(x, q, scales, format, scale, scale_x)
    if out.numel() == 0 or x.shape[1] == 0:
        return out.zero_()
    if format != "mxfp4" or scale_x is not None:
        needs_e4m3(f"mx_matmul of {format}", x)
    q, scales = q.contiguous(), scales.contiguous()
    if scale_x is not None:
        weight, tops = portable.reencode(q, scales, x.shape[1])
        return fp8_matmul(x, weight.t(), scale_x, tops.t(), "block")
    if x.shape[0] <= FEW:
        if format == "mxfp4" and capability(x.device)[0] == 9:
            from . import _weights_hopper as hopper  # where Gluon may be missing, it is not needed

            if hopper.fits(q) and x.stride(1) == 1:
                hopper.few_rows(x, q, scales, out)
                return out
        few_rows.multiply(x, q, scales, format, scale, out)
        return out
    product = matmul(x, portable.widen(q, scales, format, x.shape[1]).t())
    return product if scale is None else product.mul_(scale)


_mx_matmul = operator(
    "mx_matmul(Tensor x, Tensor q, Tensor scales, str format, Tensor? scale, Tensor? scale_x) -> Tensor",
    _launch,
    _empty,
)
