"""A linear layer of a model, as training calls it: one product forward, two backward.

Products alone, with other layouts, epilogues and TF32, are `matmul`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, K), weight (N, K), drawn so that outputs are about 1, and bias (N,) or None, in the case's dtype."""
    import torch

    M, N, K = (case.axes[axis] for axis in "MNK")

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))

    return {"x": drawn(M, K), "weight": drawn(N, K) * K**-0.5, "bias": drawn(N) if case.options["bias"] else None}


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias."""
    product = x @ weight.T
    return product if bias is None else product + bias


def bytes_(case: Case) -> int:
    """Forward reads x and the weight and writes the product; backward reads these three, the product's gradient in
    its place, and writes both gradients.
    """
    M, N, K = (case.axes[axis] for axis in "MNK")
    bias = N if case.options["bias"] else 0
    forward = M * K + K * N + M * N + bias
    backward = 2 * (M * K + K * N) + M * N + bias
    numbers = {"forward": forward, "backward": backward, "forward_backward": forward + backward}[case.pass_]
    return numbers * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Two a number of the product times K, and for each of two gradients as many."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return {"forward": 2, "backward": 4, "forward_backward": 6}[case.pass_] * M * N * K


OPERATOR = Operator(
    name="linear",
    summary="linear layer with the gradients of input, weight and bias",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the input"},
    options={"bias": (False, True)},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("bf16", "fp16"),
    gradients=("x", "weight", "bias"),
    plans={
        "quick": (grid("forward_backward", M=4096, N=4096, K=4096),),
        "quick_cpu": (grid("forward", M=64, N=256, K=320),),
        "standard": (
            *(
                grid("forward", "backward", M=16384, N=N, K=K)
                for N, K in ((2048, 2048), (1024, 2048), (8192, 2048), (2048, 8192))
            ),
            grid("forward", "backward", M=8192, N=[2304, 3072], K=768, options={"bias": True}),
        ),
        "full": (
            grid("forward_backward", M=[1, 1000], N=1001, K=999, options={"bias": [False, True]}),
            grid("forward_backward", M=4096, N=4096, K=4096, dtypes="fp16"),
        ),
    },
)
