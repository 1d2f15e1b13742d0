"""Queries, keys and values of one input: three products, of which two are turned by rotary positions (Su et al.,
arXiv 2104.09864). What attention then reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype
from .rope import reference as turned

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (B, S, K), the weights query (H · D, K), key and value (Hkv · D, K), cos and sin (S, D / 2), all in the
    case's dtype.
    """
    import torch

    B, S, K, H, Hkv, D = (case.axes[axis] for axis in ("B", "S", "K", "H", "Hkv", "D"))
    dtype = torch_dtype(case.dtype)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=dtype)

    frequency = 10000.0 ** -(torch.arange(0, D, 2, device=device, dtype=torch.float64) / D)
    angle = torch.arange(S, device=device, dtype=torch.float64)[:, None] * frequency
    weights = {name: drawn(n * D, K) * K**-0.5 for name, n in (("query", H), ("key", Hkv), ("value", Hkv))}
    return {"x": drawn(B, S, K), **weights, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


def reference(
    x: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q (B, H, S, D), k and v (B, Hkv, S, D)); dimension i of a head of q and k is paired with i + D / 2."""
    D = 2 * cos.shape[1]
    q, k, v = ((x @ weight.T).unflatten(-1, (-1, D)).transpose(1, 2) for weight in (query, key, value))
    return (*turned(q, k, cos, sin, "half"), v)


def _sizes(case: Case) -> tuple[int, int, int]:
    """Numbers of x, of the weights, and of the results."""
    B, S, K, H, Hkv, D = (case.axes[axis] for axis in ("B", "S", "K", "H", "Hkv", "D"))
    return B * S * K, (H + 2 * Hkv) * D * K, (H + 2 * Hkv) * D * B * S


def bytes_(case: Case) -> int:
    """Forward reads x, the weights and the tables and writes the results; backward reads these, the results'
    gradients in their place, and writes the gradients of x and of the weights.
    """
    x, weights, results = _sizes(case)
    tables = case.axes["S"] * case.axes["D"]
    forward = x + weights + results + tables
    passes = {"forward": forward, "backward": forward + x + weights}
    numbers = passes.get(case.pass_, sum(passes.values()))
    return numbers * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Two a number of the results times K, and for each of two gradients as many."""
    products = _sizes(case)[2] * case.axes["K"]
    return {"forward": 2, "backward": 4, "forward_backward": 6}[case.pass_] * products


OPERATOR = Operator(
    name="qkv_rope",
    summary="projections to queries, keys and values, the first two turned by rotary positions",
    axes={
        "B": "batch",
        "S": "sequence",
        "K": "width",
        "H": "query heads",
        "Hkv": "key heads",
        "D": "head dimension",
    },
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    dtypes=("bf16", "fp16"),
    gradients=("x", "query", "key", "value"),
    forms=("fused",),
    plans={
        "quick": (grid("forward_backward", B=2, S=2048, K=2048, H=16, Hkv=8, D=128),),
        "quick_cpu": (grid("forward", B=1, S=64, K=256, H=4, Hkv=2, D=64),),
        "standard": (
            grid("forward", "backward", B=4, S=4096, K=2048, H=16, Hkv=8, D=128),
            grid("forward", "backward", B=1, S=8192, K=4096, H=32, Hkv=8, D=128),
        ),
        "full": (
            grid("forward", "backward", B=4, S=4096, K=2048, H=32, Hkv=8, D=64),
            grid("forward_backward", B=1, S=1023, K=999, H=7, Hkv=1, D=96),
        ),
    },
)
