"""Matrix products of E4M3 numbers with 2:4 weights, stored without the two of each four neighbours that are 0."""

from __future__ import annotations

import torch

from .._common import check, needs_e4m3, operator
from .fp8_matmul import fp8_matmul
from .sparse24_matmul import check_weight, expanded


def sparse24_fp8_matmul(
    x: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor | None,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
) -> torch.Tensor:
    """(x · scale_x) @ (weight · scale_w).T in bf16 of x (M, K) and values (N, K/2) in float8_e4m3fn, with
    positions (N, K/8) as `sparse24_matmul` takes them, and fp32 scales of rows, (M, 1) and (N, 1). K is a
    multiple of 8.

    `weight` (N, K) is the same in dense form: given or made here, it is what x is multiplied by, since Triton
    has no sparse products.
    Not differentiable.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, NotImplementedError on GPUs
    that do not convert to E4M3; the message names the argument.
    """
    check("x", x, dim=2, dtypes=(torch.float8_e4m3fn,))
    check_weight(x, values, positions, weight)
    M, N = x.shape[0], values.shape[0]
    check("scale_x", scale_x, shape=(M, 1), like=x, dtypes=(torch.float32,))
    check("scale_w", scale_w, shape=(N, 1), like=x, dtypes=(torch.float32,))
    result: torch.Tensor = _sparse24_fp8_matmul(x, values, positions, weight, scale_x, scale_w)
    return result


def _empty(
    x: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor | None,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
) -> torch.Tensor:
    return torch.empty(x.shape[0], values.shape[0], dtype=torch.bfloat16, device=x.device)


def _launch(
    x: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor | None,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
) -> torch.Tensor:
    needs_e4m3("sparse24_fp8_matmul", x)
    if weight is None:
        weight = expanded(values, positions)
    return fp8_matmul(x, weight.t(), scale_x, scale_w.t(), "row")


_sparse24_fp8_matmul = operator(
    "sparse24_fp8_matmul(Tensor x, Tensor values, Tensor positions, Tensor? weight, Tensor scale_x, "
    "Tensor scale_w) -> Tensor",
    _launch,
    _empty,
)
