"""Cross-entropy of a language model: the mean negative log-likelihood of one token of the vocabulary a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """logits (M, V) in the case's dtype, target (M,) int64 in [0, V)."""
    import torch

    M, V = case.axes["M"], case.axes["V"]
    dtype = torch_dtype(case.dtype)
    return {
        "logits": torch.randn(M, V, device=device, generator=generator, dtype=dtype),
        "target": torch.randint(0, V, (M,), device=device, generator=generator),
    }


def reference(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """mean over rows of logsumexp(logits) - logits[target], a scalar."""
    return (logits.logsumexp(-1) - logits.gather(-1, target[:, None]).squeeze(-1)).mean()


def bytes_(case: Case) -> int:
    """Forward reads the logits; backward reads them and writes their gradient; each reads the targets.

    The gradient of the loss is known to backward alone, which is why both together count three times the
    logits; who writes the gradient in forward, assuming 1, moves less.
    """
    M, V = case.axes["M"], case.axes["V"]
    tensors, targets = {"forward": (1, 1), "backward": (2, 1), "forward_backward": (3, 2)}[case.pass_]
    return tensors * M * V * BYTES[case.dtype] + targets * M * 8


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="cross_entropy",
    summary="mean cross-entropy of logits and target tokens",
    axes={"M": "tokens", "V": "vocabulary"},
    # Not fp16: p / M is below its smallest number, so that no implementation can be right.
    dtypes=("bf16", "fp32"),
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    gradients=("logits",),
    plans={
        "quick": (grid("forward", "forward_backward", M=4096, V=32000),),
        "quick_cpu": (grid("forward", M=64, V=16384, dtypes="fp32"),),
        "standard": (
            grid("forward", "forward_backward", M=[4096, 16384], V=32000),
            grid("forward", "forward_backward", M=8192, V=128256),
        ),
        "full": (
            grid("forward", "forward_backward", M=4096, V=32000, dtypes="fp32"),
            grid("forward", "forward_backward", M=[1, 4095], V=50257),
            grid("forward", "forward_backward", M=4096, V=262144),
        ),
    },
)
