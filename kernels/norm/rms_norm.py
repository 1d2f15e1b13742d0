"""Root mean square normalization (Zhang and Sennrich, arXiv 1910.07467), forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from .._common import check, operator
from ._norm import empty, empty_gradients, gradients, normalize


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension.

    x (…, D) and weight (D,), in bf16, fp16 or fp32, to y (…, D) in x's dtype; statistics in fp32.
    Differentiable in x and weight. Raises TypeError for a wrong type or dtype, ValueError for a wrong
    shape or device; the message names the argument.
    """
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    check("weight", weight, shape=x.shape[-1:], like=x)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y: torch.Tensor = _saving(x, weight, eps)[0]
        return y
    y = _plain(x, weight, eps)
    return y


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return normalize(x, None, weight, None, eps, save=False)[0]


def _launch_saving(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, _, rstd = normalize(x, None, weight, None, eps, save=True)
    assert rstd is not None
    return y, rstd


def _empty_saving(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, _, rstd = empty(x, residual=False, centred=False, save=True)
    assert rstd is not None
    return y, rstd


def _launch_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return gradients(dy, None, x, weight, None, rstd)[:2]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None
    return *_gradients(dy, *ctx.saved_tensors), None


_plain = operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    _launch,
    lambda x, weight, eps: empty(x, residual=False, centred=False, save=False)[0],
)
_saving = operator(
    "rms_norm_saving(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _launch_saving,
    _empty_saving,
    _save,
    _backward,
)
_gradients = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    _launch_backward,
    lambda dy, x, weight, rstd: empty_gradients(x, weight)[:2],
)
