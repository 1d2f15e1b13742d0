"""A linear layer in 8 bits as a model runs it: RMSNorm or SwiGLU, quantized 1×128 to E4M3, then the product with a
weight in E4M3 with a scale for 128 × 128 of it (DeepSeek-V3, arXiv 2412.19437).

The weight is quantized before, as in a model that is served; the activation within what is timed. So `error` is
against the exact activation times the quantized weight: it has the activation's rounding in it.
`error_unquantized` has the weight's too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Option, Tolerance, grid
from ._accuracy import SATURATED, UNDERFLOWED, WEIGHT_BYTES, saturated, underflowed, weight_bytes
from .fp8_matmul import BLOCK, quantized_weight, results_of, widened
from .quantized_activation import EPS, drawn
from .quantized_activation import reference as activation

if TYPE_CHECKING:
    import torch

TOLERANCE = Tolerance(norm=0.032, absolute=0.2, relative=0.1)
"""E4M3's rounding of the activation comes to 0.025 to 0.027 of the output; truncation to twice that."""


def original(
    case: Case, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x and the norm's weight as `quantized_activation` has them, and the weight (N, K) in bf16: what `inputs`
    quantizes when it gets the same generator.
    """
    import torch

    N, K = case.axes["N"], case.axes["K"]
    x, norm_weight = drawn(case, device, generator)
    weight = torch.randn(N, K, device=device, generator=generator, dtype=torch.bfloat16).mul_(K**-0.5)
    return x, norm_weight, weight


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, K) with the norm's weight (K,), or gate and up side by side (M, 2K) with None; the weight (N, K) in
    E4M3 and its scales (⌈N / 128⌉, ⌈K / 128⌉) in fp32; the norm's epsilon.
    """
    x, norm_weight, weight = original(case, device, generator)
    q, scale = quantized_weight(weight)
    return {"x": x, "weight": q, "scale": scale, "norm_weight": norm_weight, "eps": EPS}


def reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, norm_weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """activation(x) @ (weight · scale).T."""
    N, K = weight.shape
    return activation(x, norm_weight, eps) @ (weight * widened(scale, (N, K), BLOCK, BLOCK)).T


def unquantized(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """activation(x) @ weight.T with the weight before it was quantized."""
    x, norm_weight, weight = original(case, device, generator)
    wide = None if norm_weight is None else norm_weight.double()
    return activation(x.double(), wide, EPS) @ weight.double().T


def results(result: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The product; the wrong shape or dtype becomes NaN, which is wrong."""
    return results_of(result, (inputs["x"].shape[0], inputs["weight"].shape[0]))


def bytes_(case: Case) -> int:
    """Reads x, the norm's weight, the weight and its scales; writes the product in bf16."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    norm = case.options["activation"] == "rms_norm"
    given = (M * K + K if norm else 2 * M * K) * BYTES[case.dtype]
    return given + N * K + -(-N // BLOCK) * -(-K // BLOCK) * BYTES["fp32"] + M * N * BYTES["bf16"]


def flops(case: Case) -> int:
    """Two a number of the product times K."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return 2 * M * N * K


SWIGLU: dict[str, Option | list[Option]] = {"activation": "swiglu"}
DATA: dict[str, Option | list[Option]] = {"data": ["normal", "outliers"], "activation": ["rms_norm", "swiglu"]}

OPERATOR = Operator(
    name="quantized_linear",
    summary="RMSNorm or SwiGLU quantized to E4M3, then the product with an E4M3 weight",
    axes={"M": "tokens", "N": "columns of the output", "K": "columns of the activation"},
    options={"activation": ("rms_norm", "swiglu"), "data": ("normal", "outliers"), "products": ("e4m3",)},
    # Its limit is that of products of 8 bits, whatever its inputs are.
    later={"products": "e4m3"},
    inputs=inputs,
    reference=reference,
    results=results,
    unquantized=unquantized,
    measures={
        SATURATED: saturated("weight"),
        UNDERFLOWED: underflowed("weight"),
        WEIGHT_BYTES: weight_bytes("weight", "scale"),
    },
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("bf16",),
    tolerances={"bf16": TOLERANCE},
    # Epsilon became large: nothing else is drawn or computed.
    continues={
        "47b5f141d353": "0dc245317398",
    },
    plans={
        "quick": (grid("forward", M=4096, N=4096, K=4096),),
        "quick_cpu": (grid("forward", M=16, N=256, K=320),),
        "standard": (
            grid("forward", M=[16, 8192], N=6144, K=4096),
            grid("forward", M=[16, 8192], N=4096, K=14336, options=SWIGLU),
            grid("forward", M=4096, N=5760, K=2880),
        ),
        "full": (
            grid("forward", M=4096, N=4096, K=7168, options=DATA),
            grid("forward", M=[1, 100, 4095], N=2880, K=2880, options=DATA),
            grid("forward", M=1000, N=1001, K=999),
        ),
    },
)
