"""Cross-entropy of a language model: the mean negative log-likelihood of one token of the vocabulary a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


IGNORED = -100

LABEL_SMOOTHING = 0.1

Z_LOSS = 0.01
"""A hundred times what models are trained with, so that who leaves it out is found wrong."""


OFFSET = 4.0
"""Of all logits: their mean, which smoothing adds to a loss, is not 0."""

HIT = -6.0
"""Of the target's logit beside the others: of targets like all others a mean over thousands of rows is the same,
within the rounding of bf16, whichever logit is taken for them, and with none. Below them, not above: a loss near 0
would be the difference of two numbers that bf16 rounds.
"""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """logits (M, V) in the case's dtype, target (M,) int64 in [0, V), whose logits are the smaller ones.

    Regularized, every eighth target is -100, which counts for nothing, and there are two more inputs.
    """
    import torch

    M, V = case.axes["M"], case.axes["V"]
    dtype = torch_dtype(case.dtype)
    logits = torch.randn(M, V, device=device, generator=generator, dtype=dtype)
    target = torch.randint(0, V, (M,), device=device, generator=generator)
    logits += OFFSET
    logits[torch.arange(M, device=device), target] += HIT
    if not case.options["regularized"]:
        return {"logits": logits, "target": target}
    target[1::8] = IGNORED
    return {"logits": logits, "target": target, "label_smoothing": LABEL_SMOOTHING, "z_loss": Z_LOSS}


def reference(
    logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> torch.Tensor:
    """mean over rows that count of logsumexp(logits) - logits[target], a scalar.

    Smoothing moves so much of the weight of logits[target] to the mean logit; z_loss adds so much of the square of
    logsumexp(logits).
    """
    counts = target != IGNORED
    hit = logits.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
    total = logits.logsumexp(-1)
    losses = total - (1 - label_smoothing) * hit + z_loss * total.square()
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(-1)
    return losses.where(counts, 0).sum() / counts.sum()


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
    # Label smoothing, a z-loss and targets that do not count, all at once.
    options={"regularized": (False, True)},
    # Not fp16: p / M is below its smallest number, so that no implementation can be right.
    dtypes=("bf16", "fp32"),
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    gradients=("logits",),
    # Targets' logits became smaller, and the others' mean larger: nothing else is drawn or computed.
    continues={
        "a92105431b8d": "297fb9d29dc3",
        "aa8edddd03c6": "74988664c06e",
        "980b404cc281": "af621bfcd594",
        "f332c611bc6a": "071d05defc29",
    },
    plans={
        "quick": (grid("forward", "forward_backward", M=4096, V=32000),),
        "quick_cpu": (grid("forward", M=64, V=16384, dtypes="fp32"),),
        "standard": (
            grid("forward", "forward_backward", M=[4096, 16384], V=32000),
            grid("forward", "forward_backward", M=8192, V=128256),
            grid("forward_backward", M=8192, V=128256, options={"regularized": True}),
        ),
        "full": (
            grid("forward", "forward_backward", M=4096, V=32000, dtypes="fp32"),
            grid("forward", "forward_backward", M=[1, 4095], V=50257),
            grid("forward", "forward_backward", M=4096, V=262144),
        ),
    },
)
