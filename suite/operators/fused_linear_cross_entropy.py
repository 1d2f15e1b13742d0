"""The last layer of a language model and its loss, fused (Liger-Kernel, Hsu et al., arXiv 2410.10989)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


HIT = -4.0
"""The target's logit, about, where others are about 1: as of `cross_entropy`, else who takes another would be
right within the rounding of bf16. Nearer to 0 of widths below 64, where a row of x that has so much of one weight
has much of all.
"""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, D) and weight (V, D) in the case's dtype, target (M,) int64 in [0, V).

    The weight is as small as a layer's is, so that logits have variance 1; a row of x has the target's in it.
    """
    import torch

    M, D, V = (case.axes[axis] for axis in "MDV")
    dtype = torch_dtype(case.dtype)
    x = torch.randn(M, D, device=device, generator=generator, dtype=dtype)
    weight = torch.randn(V, D, device=device, generator=generator, dtype=dtype).mul_(D**-0.5)
    target = torch.randint(0, V, (M,), device=device, generator=generator)
    return {"x": x.add_(weight[target], alpha=max(HIT, -(D**0.5) / 2)), "weight": weight, "target": target}


def reference(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mean over rows of logsumexp(logits) - logits[target] for logits = x @ weight.T, a scalar."""
    logits = x @ weight.t()
    return (logits.logsumexp(-1) - logits.gather(-1, target[:, None]).squeeze(-1)).mean()


def bytes_(case: Case) -> int:
    """Forward reads x and weight; backward reads them and writes their gradients; each reads the targets."""
    M, D, V = (case.axes[axis] for axis in "MDV")
    tensors, targets = {"forward": (1, 1), "backward": (2, 1), "forward_backward": (3, 2)}[case.pass_]
    return tensors * (M + V) * D * BYTES[case.dtype] + targets * M * 8


def flops(case: Case) -> int:
    """One product forward; two backward, of the logits' gradient with the weight and with x."""
    M, D, V = (case.axes[axis] for axis in "MDV")
    return {"forward": 1, "backward": 2, "forward_backward": 3}[case.pass_] * 2 * M * D * V


OPERATOR = Operator(
    name="fused_linear_cross_entropy",
    summary="mean cross-entropy of a linear layer's outputs, without the logits in memory",
    axes={"M": "tokens", "D": "model dimension", "V": "vocabulary"},
    # Not fp16: p / M is below its smallest number, so that no implementation can be right.
    dtypes=("bf16", "fp32"),
    inputs=inputs,
    reference=reference,
    # fp64 logits of the large cases would not fit beside the rest.
    fp32_reference=True,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    gradients=("x", "weight"),
    # Targets' logits became smaller: nothing else is drawn or computed.
    continues={
        "958c36819a1a": "80e89b472926",
        "d428f8c8979a": "71e4fe2de3f7",
        "562827345999": "aea5f4cf7e65",
        "cf6be63cec19": "161479884978",
    },
    plans={
        "quick": (grid("forward_backward", M=4096, D=2048, V=32000),),
        "quick_cpu": (grid("forward", M=64, D=256, V=8192, dtypes="fp32"),),
        "standard": (
            grid("forward", "forward_backward", M=4096, D=4096, V=128256),
            grid("forward_backward", M=[8192, 16384], D=4096, V=[32000, 128256]),
        ),
        "full": (
            grid("forward", "forward_backward", M=4095, D=2048, V=50257),
            grid("forward", "forward_backward", M=4096, D=2304, V=256000),
            grid("forward_backward", M=2048, D=2048, V=32000, dtypes="fp32"),
            grid("forward_backward", M=[64, 32768], D=4096, V=128256),
        ),
    },
)
