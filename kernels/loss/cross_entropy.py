"""Cross-entropy of logits and target tokens: one read forward, one read and one write backward.

Where the caller allows it, forward makes the gradient as well, and the logits are read from memory once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._common import check, choice, dense_like, needs_gradient, operator
from .._launch import prepared, room, room_like
from . import _cross_entropy as kernels


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gradient: str = "backward",
) -> torch.Tensor:
    """mean of logsumexp(logits) - logits[target] over rows whose target is not `ignore_index`.

    logits (M, V) in bf16, fp16 or fp32 and target (M,) int64 to a scalar in the dtype of logits; computed
    in fp32. `label_smoothing` in [0, 1] takes so much of the target's weight and spreads it over all V tokens;
    `z_loss` adds so much of logsumexp(logits)². NaN where no row counts, or where a target is outside [0, V).

    Differentiable in logits. With `gradient` "backward" the backward pass reads the logits again; with
    "forward" the forward pass makes their gradient beside the loss and keeps it in their place, which moves a
    third less memory where the loss itself is what backward starts from. fp16 cannot hold the gradient of many
    rows: p / M is below its smallest number.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or option; the message
    names the argument.
    """
    choice("gradient", gradient, ("backward", "forward"))
    both = gradient == "forward" and needs_gradient(logits)
    call = _with_gradient if both else _cross_entropy
    loss: torch.Tensor = call(logits, target, ignore_index, label_smoothing, z_loss)[0]
    return loss


def _check(logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, z_loss: float) -> None:
    check("logits", logits, dim=2)
    check("target", target, shape=logits.shape[:1], like=logits, dtypes=(torch.int64,))
    check_smoothing(smoothing)


def check_smoothing(label_smoothing: float) -> None:
    """Raises ValueError where it is not a share."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 to 1")


def dense(logits: torch.Tensor) -> torch.Tensor:
    """Logits whose rows are dense; a copy only where strides demand one."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _empty(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for loss (), the two parts of log-sum-exp (M, 2) and 1 / rows that count ()."""
    return (
        torch.empty((), dtype=logits.dtype, device=logits.device),
        torch.empty((logits.shape[0], 2), dtype=torch.float32, device=logits.device),
        torch.empty((), dtype=torch.float32, device=logits.device),
    )


def _prepare(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    device = logits.device
    if logits.numel() == 0:

        def nothing(logits: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            loss, lse, share = _empty(logits, *arguments)
            return loss.fill_(torch.nan), lse.fill_(-torch.inf), share.fill_(torch.inf)

        return nothing
    losses_of_rows = kernels.losses_of_rows(dense(logits), kernels.Options(ignore_index, smoothing, z_loss))
    mean_of_rows = kernels.mean_of_rows(logits.shape[0], ignore_index)
    of_loss, of_share = room((), logits.dtype, device), room((), torch.float32, device)
    of_rows, of_lse = (room(shape, torch.float32, device) for shape in (logits.shape[:1], (logits.shape[0], 2)))

    def run(
        logits: torch.Tensor, target: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        loss, lse, share = results = of_loss(), of_lse(), of_share()
        losses = of_rows()
        target = target.contiguous()
        losses_of_rows(device, dense(logits), target, losses, lse)
        mean_of_rows(device, losses, target, loss, share)
        return results

    return run


def _prepare_backward(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    share: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> Callable[..., torch.Tensor]:
    device = logits.device
    if logits.numel() == 0:
        return lambda dloss, logits, *_: dense_like(logits)
    options = kernels.Options(ignore_index, smoothing, z_loss)
    gradients_of_rows = kernels.gradients_of_rows(dense(logits), dense_like(logits), options)
    of_dlogits = room_like(logits)

    def run(
        dloss: torch.Tensor,
        logits: torch.Tensor,
        target: torch.Tensor,
        lse: torch.Tensor,
        share: torch.Tensor,
        *_: Any,
    ) -> torch.Tensor:
        dlogits = of_dlogits()
        gradients_of_rows(device, dloss, share, dense(logits), target.contiguous(), lse, dlogits)
        return dlogits

    return run


def _empty_with_gradient(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for loss () and dlogits (M, V)."""
    return torch.empty((), dtype=logits.dtype, device=logits.device), dense_like(logits)


def _prepare_with_gradient(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    device, M = logits.device, logits.shape[0]
    if logits.numel() == 0:
        return lambda logits, *_: (logits.new_full((), torch.nan), dense_like(logits))
    options = kernels.Options(ignore_index, smoothing, z_loss)
    share_of_rows = kernels.share_of_rows(M, ignore_index)
    losses_and_gradients = kernels.losses_and_gradients(dense(logits), dense_like(logits), options)
    mean_of_rows = kernels.mean_of_rows(M, ignore_index)
    of_loss, of_share = room((), logits.dtype, device), room((), torch.float32, device)
    of_rows, of_dlogits = room((M,), torch.float32, device), room_like(logits)

    def run(logits: torch.Tensor, target: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, dlogits = results = of_loss(), of_dlogits()
        target = target.contiguous()
        losses, share = of_rows(), of_share()
        share_of_rows(device, target, share)
        losses_and_gradients(device, dense(logits), target, share, losses, dlogits)
        mean_of_rows(device, losses, target, loss, share)
        return results

    return run


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.options = inputs[2:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 5
    return _cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _save_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.made_forward = True
    ctx.set_materialize_grads(False)


def _backward_from_gradient(ctx: Any, dloss: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 5
    dlogits = ctx.saved_tensors[0]
    return kernels.scaled(dlogits, dloss, dlogits.dtype), None, None, None, None


_cross_entropy = operator(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index, float smoothing, float z_loss)"
    " -> (Tensor, Tensor, Tensor)",
    prepared(_prepare, _check),
    _empty,
    _save,
    _backward,
    check=_check,
    hidden=2,
)
_cross_entropy_backward = operator(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor lse, Tensor share,"
    " int ignore_index, float smoothing, float z_loss) -> Tensor",
    prepared(_prepare_backward),
    lambda dloss, logits, *_: dense_like(logits),
)
_with_gradient = operator(
    "cross_entropy_with_gradient(Tensor logits, Tensor target, int ignore_index, float smoothing, float z_loss)"
    " -> (Tensor, Tensor)",
    prepared(_prepare_with_gradient, _check),
    _empty_with_gradient,
    _save_gradient,
    _backward_from_gradient,
    check=_check,
)
