"""A linear layer and the cross-entropy of its outputs; of the logits no more than a gigabyte is there at once.

Rows are taken in chunks, as Liger-Kernel does (Hsu et al., arXiv 2410.10989): the logits of a chunk are a matrix
product into one buffer, a kernel writes their gradient over them as it finds the loss, and two more products turn
that into the gradients of input and weight. All products are cuBLAS's. Chunks are as large as a bound on the
buffer allows, since small products are slow and every chunk after the first reads the weight's gradient again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._common import INTERPRETED, cdiv, check, needs_gradient, operator
from .._launch import prepared, room
from . import _cross_entropy as kernels
from .cross_entropy import check_smoothing

BUFFER = 2048 if INTERPRETED else 1 << 30
"""Largest size of the buffer for logits in bytes, where the caller does not say how many rows it should hold."""

STEP = 4 if INTERPRETED else 256
"""Rows of a chunk are a multiple of it, so that the products fill their tiles."""

EVEN = 8
"""A vocabulary that is no multiple of it is padded to whole rows of the buffer, which costs a copy of the weight:
cuBLAS multiplies odd shapes by kernels that load element by element, several times as slow.
"""

ALIGNMENT = 128
"""Bytes that a row of the buffer is a multiple of, so that every row can be read in vectors."""


def fused_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    precise: bool = False,
) -> torch.Tensor:
    """The `cross_entropy` of x @ weight.T and target, with the same options, in bounded memory.

    x (M, D) and weight (V, D) in one of bf16, fp16 and fp32, target (M,) int64 to a scalar in the dtype of x.
    Logits are rounded to that dtype, the loss is computed in fp32. Differentiable in x and weight; the gradients
    that are needed are made in the forward pass and only scaled by the backward pass. fp16 cannot hold the
    gradient of many rows.

    `chunk` is how many rows have their logits in memory at a time; without it as many as 1 GiB holds. x's
    gradient is rounded once, when it is scaled. The weight's is rounded after each chunk, and when it is scaled by
    anything but a power of two; `precise` keeps it in fp32 until then, for twice its memory and some more time.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or option; the message names
    the argument.
    """
    loss: torch.Tensor = _fused(
        x,
        weight,
        target,
        ignore_index,
        label_smoothing,
        z_loss,
        chunk,
        precise,
        needs_gradient(x),
        needs_gradient(weight),
    )[0]
    return loss


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    chunk: int | None,
    *_: bool,
) -> None:
    """Raises what `fused_linear_cross_entropy` says."""
    check("x", x, dim=2)
    check("weight", weight, dim=2, like=x, dtypes=(x.dtype,))
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (V, {x.shape[1]})")
    check("target", target, shape=x.shape[:1], like=x, dtypes=(torch.int64,))
    check_smoothing(smoothing)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}, expected a number of rows")


def rows_of_chunk(M: int, V: int, itemsize: int) -> int:
    """Rows whose logits the buffer holds: chunks of equal size, as few as fit."""
    most = max(BUFFER // (max(V, 1) * itemsize) // STEP * STEP, STEP)
    return min(cdiv(cdiv(M, cdiv(M, most)), STEP) * STEP, M)


def _empty(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    chunk: int | None,
    precise: bool,
    for_x: bool,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for loss (), dx (M, D) in fp32 and dweight (V, D), the last two empty where nobody needs them."""
    wide = torch.float32
    return (
        x.new_empty(()),
        torch.empty(x.shape if for_x else 0, dtype=wide, device=x.device),
        torch.empty(weight.shape if for_weight else 0, dtype=wide if precise else x.dtype, device=x.device),
    )


def _prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    chunk: int | None,
    precise: bool,
    for_x: bool,
    for_weight: bool,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    options = kernels.Options(ignore_index, smoothing, z_loss)
    device, (M, D), V = x.device, x.shape, weight.shape[0]
    if M == 0 or V == 0:

        def nothing(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            loss, dx, dweight = _empty(*arguments)
            return loss.fill_(torch.nan), dx.zero_(), dweight.zero_()

        return nothing
    height = min(chunk, M) if chunk else rows_of_chunk(M, V, x.element_size())
    vectors = ALIGNMENT // x.element_size()
    pitch = cdiv(V, vectors) * vectors
    columns = pitch if V % EVEN else V
    share_of_rows = kernels.share_of_rows(M, ignore_index)
    mean_of_rows = kernels.mean_of_rows(M, ignore_index)

    def of_rows(rows: int) -> Callable[..., None]:
        """Losses, and where they are needed gradients, of a chunk of so many rows."""
        logits = x.new_empty(rows, pitch)[:, :V]
        if for_x or for_weight:
            both = kernels.losses_and_gradients(logits, logits, options)
            return lambda logits, target, share, losses: both(device, logits, target, share, losses, logits)
        alone = kernels.losses_alone(logits, options)
        return lambda logits, target, share, losses: alone(device, logits, target, losses)

    # A chunk's losses and target may begin between multiples of 16 bytes, where a chunk's height is odd.
    chunks = {(min(height, M - start), start % 4) for start in range(0, M, height)}
    by_chunk = {kind: of_rows(kind[0]) for kind in chunks}
    fp32 = torch.float32
    of_loss, of_share, of_losses = room((), x.dtype, device), room((), fp32, device), room((M,), fp32, device)
    of_dx = room((M, D) if for_x else (0,), fp32, device)
    of_dweight = room((columns, D) if for_weight else (0,), fp32 if precise else x.dtype, device)
    of_buffer = room((height, columns), x.dtype, device, (pitch, 1))

    def run(
        x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        loss, dx, dweight, buffer = of_loss(), of_dx(), of_dweight(), of_buffer()
        losses, share, target = of_losses(), of_share(), target.contiguous()
        with torch.no_grad():
            padded = weight
            if columns != V:
                padded = weight.new_zeros((columns, D))
                padded[:V].copy_(weight)
            turned = padded.t()
            if for_x or for_weight:  # a loss alone is divided once, at the end
                share_of_rows(device, target, share)
            for start in range(0, M, height):
                # Each view costs the host a microsecond or two: none where all rows are one chunk.
                some, wide, of_some = x, buffer, (target, losses, dx)
                if height != M:
                    piece = slice(start, start + height)
                    some = x[piece]
                    wide, of_some = buffer[: len(some)], (target[piece], losses[piece], dx[piece] if for_x else dx)
                torch.mm(some, turned, out=wide)
                # Beyond V they are zeros, times zeros: they add nothing to either product below. A kernel knows of
                # memory and of V.
                by_chunk[wide.shape[0], start % 4](wide, of_some[0], share, of_some[1])
                if for_x:
                    _product(wide, padded, of_some[2])
                if for_weight:
                    _product(wide.t(), some, dweight, add=start > 0)
            mean_of_rows(device, losses, target, loss, share)
        return loss, dx, dweight[:V] if for_weight and columns != V else dweight

    return run


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b; out in the dtype of a and b or in fp32."""
    if out.dtype == a.dtype:
        if add:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif not a.is_cuda:
        # The interpreter's device has no product with another dtype of the result.
        out.copy_(torch.addmm(out, a.float(), b.float(), beta=float(add)))
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.made_forward = True
    ctx.needed = inputs[8:]
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 10
    gradients = [
        kernels.scaled(saved, dloss, ctx.dtype) if needed else None
        for saved, needed in zip(ctx.saved_tensors, ctx.needed, strict=True)
    ]
    return *gradients, *(None,) * 8


_fused = operator(
    "fused_linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, float smoothing,"
    " float z_loss, int? chunk, bool precise, bool for_x, bool for_weight) -> (Tensor, Tensor, Tensor)",
    prepared(_prepare, _check),
    _empty,
    _save,
    _backward,
    _check,
)
