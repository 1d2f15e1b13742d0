"""Layer normalization (Ba, Kiros and Hinton, arXiv 1607.06450), forward and backward; with a residual added first
it is `add_layer_norm`, and without the norm itself `add_moments`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._common import check, needs_gradient, operator
from .._launch import prepared
from ._add_layer_norm import add_layer_norm, add_moments, gradients
from ._norm_backward import empty_gradients, prepare_backward
from ._norm_forward import empty, prepare_forward

__all__ = ["add_layer_norm", "add_moments", "gradients", "layer_norm"]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """(x - mean) / √(variance + eps) · weight + bias over the last dimension, with the biased variance.

    x (…, D), weight and bias (D,), these two of one dtype, in bf16, fp16 or fp32, to y (…, D) in x's dtype;
    statistics in fp32. Differentiable in x, weight and bias. Raises TypeError for a wrong type or dtype,
    ValueError for a wrong shape or device; the message names the argument.
    """
    saving = needs_gradient(x, weight, bias)
    y: torch.Tensor = _saving(x, weight, bias, eps)[0] if saving else _plain(x, weight, bias, eps)
    return y


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    check("weight", weight, shape=x.shape[-1:], like=x)
    check("bias", bias, shape=x.shape[-1:], like=x, dtypes=(weight.dtype,))


def _prepare(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Callable[..., torch.Tensor]:
    run = prepare_forward(x, None, weight, bias, eps, save=False)
    return lambda x, weight, bias, eps: run(x, None, weight, bias)[0]


def _prepare_saving(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    run = prepare_forward(x, None, weight, bias, eps, save=True)

    def saving(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor | None, ...]:
        y, _, mean, rstd = run(x, None, weight, bias)
        return y, mean, rstd

    return saving


def _empty_saving(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, mean, rstd = empty(x, residual=False, centred=True, save=True)
    assert mean is not None
    assert rstd is not None
    return y, mean, rstd


def _prepare_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    run = prepare_backward(dy, None, x, weight, mean, rstd)
    return lambda dy, x, weight, mean, rstd: run(dy, None, x, weight, mean, rstd)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None
    return *_gradients(dy, *ctx.saved_tensors), None


_plain = operator(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor",
    prepared(_prepare, _check),
    lambda x, weight, bias, eps: empty(x, residual=False, centred=True, save=False)[0],
    check=_check,
)
_saving = operator(
    "layer_norm_saving(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    prepared(_prepare_saving, _check),
    _empty_saving,
    _save,
    _backward,
    check=_check,
    hidden=2,
)
_gradients = operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)",
    prepared(_prepare_backward),
    lambda dy, x, weight, mean, rstd: empty_gradients(x, weight, True),
)
