"""Softmax over the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, TOLERANCES, Inputs, Operator, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, D) in the case's dtype, spread like attention scores: a row's probabilities span decades."""
    import torch

    M, D = case.axes["M"], case.axes["D"]
    dtype = torch_dtype(case.dtype)
    return {"x": torch.randn(M, D, device=device, generator=generator, dtype=dtype).mul_(2)}


def reference(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum of exp(x) over the last dimension."""
    return x.softmax(-1)


def bytes_(case: Case) -> int:
    """Forward reads x and writes y; backward reads y and its gradient and writes that of x."""
    tensors = {"forward": 2, "backward": 3, "forward_backward": 5}[case.pass_]
    return tensors * case.axes["M"] * case.axes["D"] * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="softmax",
    summary="softmax over the last dimension",
    axes={"M": "rows", "D": "columns"},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    gradients=("x",),
    # Probabilities of long rows lie where fp16 has few digits left.
    tolerances={**TOLERANCES, "fp16": Tolerance(norm=1e-2, absolute=5e-2, relative=5e-2)},
    plans={
        "quick": (grid("forward", M=8192, D=4096),),
        "quick_cpu": (grid("forward", M=256, D=4096, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", M=8192, D=4096),
            grid("forward", "backward", M=2048, D=65536),
            grid("forward", "backward", M=64, D=262144),
            grid("forward", M=1, D=262144),
            grid("forward", M=65536, D=128),
        ),
        "full": (
            grid("forward", "backward", M=[1, 64], D=[4096, 32768]),
            grid("forward", "backward", M=8192, D=4095),
            grid("forward", "backward", M=16384, D=16384),
            grid("forward", "backward", M=2048, D=262144),
            grid("forward", "backward", M=8192, D=4096, dtypes=["fp16", "fp32"]),
        ),
    },
)
