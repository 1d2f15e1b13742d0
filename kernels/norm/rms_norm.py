"""Root mean square normalization (Zhang and Sennrich, arXiv 1910.07467), forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._common import check, needs_gradient, operator
from .._launch import prepared
from ._norm_backward import empty_gradients, prepare_backward
from ._norm_forward import empty, prepare_forward


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension.

    x (…, D) and weight (D,), in bf16, fp16 or fp32, to y (…, D) in x's dtype; statistics in fp32.
    Differentiable in x and weight. Raises TypeError for a wrong type or dtype, ValueError for a wrong
    shape or device; the message names the argument.
    """
    y: torch.Tensor = _saving(x, weight, eps)[0] if needs_gradient(x, weight) else _plain(x, weight, eps)
    return y


def _check(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    check("weight", weight, shape=x.shape[-1:], like=x)


def _prepare(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Callable[..., torch.Tensor]:
    run = prepare_forward(x, None, weight, None, eps, save=False)
    return lambda x, weight, eps: run(x, None, weight, None)[0]


def _prepare_saving(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    run = prepare_forward(x, None, weight, None, eps, save=True)
    return lambda x, weight, eps: run(x, None, weight, None)[::3]


def _empty_saving(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, _, rstd = empty(x, residual=False, centred=False, save=True)
    assert rstd is not None
    return y, rstd


def _prepare_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    run = prepare_backward(dy, None, x, weight, None, rstd)
    return lambda dy, x, weight, rstd: run(dy, None, x, weight, None, rstd)[:2]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None
    return *_gradients(dy, *ctx.saved_tensors), None


_plain = operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    prepared(_prepare, _check),
    lambda x, weight, eps: empty(x, residual=False, centred=False, save=False)[0],
    check=_check,
)
_saving = operator(
    "rms_norm_saving(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    prepared(_prepare_saving, _check),
    _empty_saving,
    _save,
    _backward,
    check=_check,
    hidden=1,
)
_gradients = operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    prepared(_prepare_backward),
    lambda dy, x, weight, rstd: empty_gradients(x, weight, False)[:2],
)
