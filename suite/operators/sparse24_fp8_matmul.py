"""Products of 8-bit floats (E4M3) with weights that have two numbers in each group of four columns, with a scale
for each row of both.

As in `sparse24_matmul` and `fp8_matmul`, pruning, packing and quantizing are outside of what is timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid
from ._accuracy import SATURATED, UNDERFLOWED, WEIGHT_BYTES, saturated, underflowed
from .fp8_matmul import TOLERANCE, results_of, scaled
from .sparse24_matmul import original, pruned, unquantized, weight_bytes

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, K), the weight's values (N, K/2) and the weight (N, K) in dense form, all in E4M3; its positions (N,
    K/8); and scales of rows, (M, 1) and (N, 1), in fp32.
    """
    import torch

    x, dense = original(case, device, generator)
    # Where the numbers are is decided before they are quantized: some become 0.
    sparse, kept, positions = pruned(dense)
    (q, scale_x), (weight, scale_w) = (scaled(y, 1, y.shape[1]) for y in (x, sparse))
    values = (kept.float() / scale_w).to(torch.float8_e4m3fn)
    return {
        "x": q,
        "values": values,
        "positions": positions,
        "weight": weight,
        "scale_x": scale_x,
        "scale_w": scale_w,
    }


def reference(
    x: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_w: torch.Tensor,
) -> torch.Tensor:
    """(x · scale_x) @ (weight · scale_w).T."""
    return (x * scale_x) @ (weight * scale_w).T


def results(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The product; the wrong shape or dtype becomes NaN, which is wrong."""
    return results_of(result, (inputs["x"].shape[0], inputs["weight"].shape[0]))


def bytes_(case: Case) -> int:
    """Reads x, the values and positions, and the scales; writes the product in bf16."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return M * K + N * K // 2 + N * K // 8 + (M + N) * BYTES["fp32"] + M * N * BYTES["bf16"]


def flops(case: Case) -> int:
    """Two a number of the product times the half of K that is there."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return M * N * K


OPERATOR = Operator(
    name="sparse24_fp8_matmul",
    summary="matrix product of E4M3 numbers with a 2:4 sparse weight and a scale a row",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the input"},
    options={"data": ("normal", "outliers")},
    inputs=inputs,
    reference=reference,
    weights=("values", "positions", "weight"),
    results=results,
    unquantized=unquantized,
    measures={
        SATURATED: saturated("x", "values"),
        UNDERFLOWED: underflowed("x", "values"),
        WEIGHT_BYTES: weight_bytes,
    },
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("e4m3",),
    tolerances={"e4m3": TOLERANCE},
    plans={
        "quick": (grid("forward", dtypes="e4m3", M=[16, 4096], N=4096, K=4096),),
        "quick_cpu": (grid("forward", dtypes="e4m3", M=16, N=256, K=320),),
        "standard": (
            grid("forward", dtypes="e4m3", M=[16, 8192], N=8192, K=8192),
            grid("forward", dtypes="e4m3", M=4096, N=5760, K=2880),
        ),
        "full": (
            grid("forward", dtypes="e4m3", M=[1, 33, 4095], N=1001, K=1000),
            grid("forward", dtypes="e4m3", M=256, N=4096, K=7168, options={"data": "outliers"}),
        ),
    },
)
