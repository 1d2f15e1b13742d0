"""Products with weights that have two numbers in each group of four columns (Mishra et al., arXiv 2104.08378).

Pruning and packing are outside of what is timed, as for a model that is served. The weight is given in its packed
form, which is what must be read, and in its dense form, for what multiplies by that. `error_unquantized` is
against the product with the weight before it was pruned.

The gradients are those of sparse training: the input's, and the weight's where it has numbers; it is 0 elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, TOLERANCES, Inputs, Operator, grid, torch_dtype
from ._accuracy import WEIGHT_BYTES, with_outliers

if TYPE_CHECKING:
    import torch


def pruned(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight (N, K) with the two largest magnitudes of each four columns, these values (N, K/2), their positions
    as bytes (N, K/8)): four bits a group, the first one's place in the lower two, the lower group in the lower
    four.
    """
    import torch

    N, K = weight.shape
    groups = weight.view(N, K // 4, 4)
    places = groups.abs().sort(dim=-1, descending=True, stable=True).indices[..., :2].sort(-1).values
    kept = groups.gather(-1, places)
    dense = torch.zeros_like(groups).scatter_(-1, places, kept)
    codes = places[..., 0] | (places[..., 1] << 2)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    return dense.view(N, K), kept.reshape(N, K // 2), packed.to(torch.uint8)


def original(case: Case, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) and the weight (N, K) before it is pruned; with data "outliers" one column of x in a hundred is 30
    times as large.
    """
    import torch

    M, N, K = (case.axes[axis] for axis in "MNK")
    dtype = torch_dtype("bf16" if case.dtype == "e4m3" else case.dtype)
    x = torch.randn(M, K, device=device, generator=generator, dtype=dtype)
    if case.options["data"] == "outliers":
        with_outliers(x)
    return x, torch.randn(N, K, device=device, generator=generator, dtype=dtype)


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, K), the weight's values (N, K/2) and positions (N, K/8), and the weight (N, K) in dense form."""
    x, dense = original(case, device, generator)
    weight, values, positions = pruned(dense)
    return {"x": x, "values": values, "positions": positions, "weight": weight}


def reference(
    x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """x @ weight.T, with gradients of the weight where it is not 0."""
    return x @ (weight * (weight != 0)).T


def unquantized(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """x @ weight.T before the weight was pruned."""
    x, weight = original(case, device, generator)
    return x.double() @ weight.double().T


def weight_bytes(outputs: list[torch.Tensor], references: list[torch.Tensor], inputs: Inputs) -> float:
    """Bytes of values and positions a number of the dense weight."""
    values = inputs["values"]
    return float(values.element_size() / 2 + 1 / 8) if values.numel() else 0.0


def bytes_(case: Case) -> int:
    """Forward reads x, the values and positions and writes the product; backward reads these and the product's
    gradient, and writes those of x and of the weight.
    """
    M, N, K = (case.axes[axis] for axis in "MNK")
    size, weight = BYTES[case.dtype], N * K // 2 * BYTES[case.dtype] + N * K // 8
    forward = (M * K + M * N) * size + weight
    backward = forward + (M * K + N * K) * size
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}[case.pass_]


def flops(case: Case) -> int:
    """Two a number of each product times the half of the weight that is there: one product, and two backward."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return M * N * K * {"forward": 1, "backward": 2, "forward_backward": 3}[case.pass_]


OPERATOR = Operator(
    name="sparse24_matmul",
    summary="matrix product with a 2:4 sparse weight",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the input"},
    options={"data": ("normal", "outliers")},
    inputs=inputs,
    reference=reference,
    weights=("values", "positions", "weight"),
    gradients=("x", "weight"),
    unquantized=unquantized,
    measures={WEIGHT_BYTES: weight_bytes},
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("bf16", "fp16"),
    tolerances={name: TOLERANCES[name] for name in ("bf16", "fp16")},
    plans={
        "quick": (grid("forward", M=[16, 4096], N=4096, K=4096),),
        "quick_cpu": (grid("forward", M=16, N=256, K=320),),
        "standard": (
            grid("forward", M=[1, 16, 64], N=16384, K=8192),
            grid("forward", M=[16, 4096], N=5760, K=2880),
            grid("forward", "backward", M=8192, N=8192, K=8192),
        ),
        "full": (
            grid("forward", M=[1, 32, 1024], N=7168, K=16384, dtypes=["bf16", "fp16"]),
            grid("forward", M=[1, 33, 4095], N=1001, K=1000),
        ),
    },
)
