"""Newton-Schulz iterations that take a matrix towards the nearest orthogonal one: what Muon steps by.

K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, with its coefficients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of X ← aX + (bA + cA²)X with A = X·Xᵀ."""

STEPS = 5


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """T gradients of one shape, (T, M, N), and the number of iterations."""
    import torch

    shape = tuple(case.axes[axis] for axis in "TMN")
    grads = torch.randn(shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))
    return {"grads": grads, "steps": STEPS}


def reference(grads: torch.Tensor, steps: int) -> torch.Tensor:
    """Each matrix over its Frobenius norm, then the iterations, on its shorter side."""
    turned = grads.shape[1] > grads.shape[2]
    x: torch.Tensor = grads.mT if turned else grads
    x = x / x.norm(dim=(1, 2), keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if turned else x
    return result


def bytes_(case: Case) -> int:
    """Reads the gradients, writes the results."""
    T, M, N = (case.axes[axis] for axis in "TMN")
    return 2 * T * M * N * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Half of the two symmetric products: r²s + r³ + 2r²s an iteration of a matrix (r, s), r ≤ s."""
    T, M, N = (case.axes[axis] for axis in "TMN")
    r, s = sorted((M, N))
    return T * STEPS * (3 * r * r * s + r**3)


OPERATOR = Operator(
    name="newton_schulz",
    summary="orthogonalization of gradients by Newton-Schulz iterations, as Muon has it",
    axes={"T": "matrices", "M": "rows", "N": "columns"},
    dtypes=("bf16", "fp32"),
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    # Each iteration stretches small singular values by up to 3.4, and the rounding of products with them:
    # PyTorch's own in bf16 is off by a hundredth of the norm. fp32 may be multiplied as TF32.
    tolerances={
        "bf16": Tolerance(norm=3e-2, absolute=0.25, relative=3e-2),
        "fp32": Tolerance(norm=4e-3, absolute=3e-2, relative=1e-2),
    },
    plans={
        "quick": (grid("forward", T=4, M=1024, N=1024),),
        "quick_cpu": (grid("forward", T=1, M=64, N=96, dtypes="fp32"),),
        "standard": (
            grid("forward", T=[1, 16], M=1024, N=1024),
            grid("forward", T=4, M=4096, N=4096),
            grid("forward", T=4, M=4096, N=14336),
        ),
        "full": (
            grid("forward", T=12, M=768, N=[768, 3072]),
            grid("forward", T=12, M=3072, N=768),
            grid("forward", T=4, M=1000, N=1001, dtypes=["bf16", "fp32"]),
            grid("forward", T=1, M=8192, N=8192),
        ),
    },
)
