"""RMSNorm or SwiGLU quantized to E4M3, then the product with an E4M3 weight: two kernels."""

from __future__ import annotations

import torch

from .._common import cdiv, check, operator
from ..quantization.quantized_activation import quantized_activation
from ._matmul import BLOCK
from .fp8_matmul import fp8_matmul


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """activation(x) @ (weight · scale).T in bf16. The activation is RMSNorm by `norm_weight` (K,) of x (M, K) or,
    without a weight, silu(gate) · up of gate and up side by side in x (M, 2K).

    weight (N, K) is float8_e4m3fn with fp32 scale (⌈N / 128⌉, ⌈K / 128⌉), as `fp8_quant(weight, "tile")` makes
    them. The activation is computed in fp32 and quantized once, with a scale for 128 columns of a row; sums of
    128 products are scaled and added up in fp32.
    Not differentiable.

    Raises as `quantized_activation` and `fp8_matmul` do; the message names the argument.
    """
    check("x", x, dim=2)
    check("weight", weight, dim=2, like=x, dtypes=(torch.float8_e4m3fn,))
    N, K = weight.shape
    width = K if norm_weight is not None else 2 * K
    if x.shape[1] != width:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (M, {width})")
    check("scale", scale, shape=(cdiv(N, BLOCK), cdiv(K, BLOCK)), like=x, dtypes=(torch.float32,))
    if norm_weight is not None:
        check("norm_weight", norm_weight, shape=(K,), like=x, dtypes=(x.dtype,))
    result: torch.Tensor = _quantized_linear(x, weight, scale, norm_weight, eps)
    return result


def _empty(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, norm_weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, norm_weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    q, scale_q = quantized_activation(x, norm_weight, eps)
    return fp8_matmul(q, weight.t(), scale_q, scale.t(), "block")


_quantized_linear = operator(
    "quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? norm_weight, float eps) -> Tensor",
    _launch,
    _empty,
)
