"""Matrix products of 16-bit numbers and of fp32 as TF32, plain, with a bias, and with a gate-and-up epilogue.

A linear layer of a weight (N, K) is layout "nt"; the gradient of its input is "nn", of its weight "tn".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, TOLERANCES, Inputs, Operator, Option, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

TF32 = Tolerance(norm=2e-3, absolute=1e-2, relative=1e-2)
"""For operands of 10 bits that may be truncated: two of them cost 8e-4 of a sum's size in the root mean square."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """a (M, K), b (K, N) or, gated, (K, 2N) with the gate's columns first, bias (N,) or None, and whether it is
    gated.

    The layout says how a and b lie in memory: n row by row, t column by column.
    """
    import torch

    M, N, K = (case.axes[axis] for axis in "MNK")
    gated = case.options["epilogue"] == "swiglu"

    def drawn(rows: int, columns: int, turned: bool) -> torch.Tensor:
        shape = (columns, rows) if turned else (rows, columns)
        x = torch.randn(shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))
        return x.t() if turned else x

    # In BLAS's words for matrices that lie row by row, which are the transposes of its own.
    a_turned, b_turned = {"nt": (False, True), "nn": (False, False), "tn": (True, False)}[
        str(case.options["layout"])
    ]
    return {
        "a": drawn(M, K, a_turned),
        "b": drawn(K, 2 * N if gated else N, b_turned),
        "bias": drawn(1, N, False)[0] if case.options["epilogue"] == "bias" else None,
        "gated": gated,
    }


def reference(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """a @ b + bias, or silu(gate) · up of the two halves of a @ b's columns."""
    import torch

    product = a @ b
    if gated:
        gate, up = product.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    return product if bias is None else product + bias


def bytes_(case: Case) -> int:
    """Reads both matrices and the bias, writes the product."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    wide = 2 * N if case.options["epilogue"] == "swiglu" else N
    bias = N if case.options["epilogue"] == "bias" else 0
    return (M * K + K * wide + M * N + bias) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Two a number of the product, gate and up each, times K."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return 2 * M * N * K * (2 if case.options["epilogue"] == "swiglu" else 1)


SHAPES = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
"""(N, K) of the products that DeepGEMM is measured at: the linear layers of DeepSeek-V3."""
LAYOUTS: dict[str, Option | list[Option]] = {"layout": ["nn", "tn"]}

OPERATOR = Operator(
    name="matmul",
    summary="matrix product in bf16, fp16 or TF32, with a bias or a SwiGLU epilogue",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the input"},
    options={"layout": ("nt", "nn", "tn"), "epilogue": ("none", "bias", "swiglu")},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    tolerances={**TOLERANCES, "fp32": TF32},
    plans={
        "quick": (grid("forward", M=4096, N=4096, K=4096), grid("forward", M=16, N=4096, K=7168)),
        "quick_cpu": (grid("forward", M=64, N=256, K=320, dtypes="fp32"),),
        "standard": (
            *(grid("forward", M=[64, 4096], N=N, K=K) for N, K in SHAPES),
            grid("forward", M=8192, N=8192, K=8192),
            grid("forward", M=4096, N=2880, K=2880),
            grid("forward", M=8192, N=4096, K=14336, options=LAYOUTS),
            grid("forward", M=8192, N=14336, K=4096, options={"epilogue": ["bias", "swiglu"]}),
        ),
        "full": (
            *(grid("forward", M=[16, 128, 8192], N=N, K=K) for N, K in SHAPES),
            grid("forward", M=[1, 100, 4095], N=2880, K=2880, options={"epilogue": ["none", "bias", "swiglu"]}),
            grid("forward", M=4096, N=4096, K=4096, dtypes=["fp16", "fp32"]),
            grid("forward", M=1000, N=1001, K=999, dtypes=["bf16", "fp32"]),
        ),
    },
)
