"""A layer of a model whose products may be computed in 8-bit integers, as inference on CPUs does it.

The weight stays: an implementation may keep it in whatever form it likes, quantized before its first call ends.
How the input is rounded, by row or as a whole, is its own choice. So the answer is held to the exact product
within what rounding to 8 bits costs, and the column of errors says what each choice gave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Tolerance, grid

if TYPE_CHECKING:
    import torch

TOLERANCE = Tolerance(norm=3e-2, absolute=2.5e-1, relative=1e-1)
"""Numbers drawn from a normal distribution, rounded to 255 steps of their largest of a million (5 deviations), are
off by 1.1 % of their size in the root mean square; two operands by 1.6 %."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, K) and a `torch.nn.Linear` of a weight (N, K) without a bias, which no call changes; both in fp32."""
    import torch

    M, N, K = (case.axes[axis] for axis in "MNK")
    layer = torch.nn.Linear(K, N, bias=False, device="meta").to_empty(device=device).requires_grad_(False)
    layer.weight.normal_(std=K**-0.5, generator=generator)
    return {"x": torch.randn(M, K, device=device, generator=generator), "layer": layer}


def reference(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """x @ weight.T in x's dtype."""
    import torch

    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return x @ weight.to(x.dtype).T


def bytes_(case: Case) -> int:
    """Reads x, and the weight, a byte a number, with a scale an output; writes the product."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return (M * K + M * N + N) * BYTES["fp32"] + N * K * BYTES["int8"]


def flops(case: Case) -> int:
    """Two a number of the product times K."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return 2 * M * N * K


OPERATOR = Operator(
    name="int8_linear",
    summary="a layer with a fixed weight, its product in 8-bit integers",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the input"},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("int8",),
    tolerances={"int8": TOLERANCE},
    plans={
        "quick": (grid("forward", M=4096, N=4096, K=4096, dtypes="int8"),),
        "quick_cpu": (grid("forward", M=64, N=256, K=320, dtypes="int8"),),
        "standard": (grid("forward", M=[1, 128, 1024], N=4096, K=4096, dtypes="int8"),),
        "full": (grid("forward", M=[7, 1000], N=1001, K=1005, dtypes="int8"),),
    },
)
