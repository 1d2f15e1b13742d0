"""Cross-entropy of logits and target tokens: one read forward, one read and one write backward.

Forward keeps running maxima and sums of exponentials (online softmax, Milakov and Gimelshein, arXiv
1805.02867). Every thread has its own for each of its 16-byte vectors, so that nothing waits for other
threads before the end of the row and there is one exponential more a vector, not an element.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ._common import INTERPRETED, cdiv, check, dense_like, on, operator, power_of_2

LANES = 4 if INTERPRETED else 512
"""Running maxima of a program of eight warps: two a thread. The interpreter has few, to turn the loops."""

PIECE = 32 if INTERPRETED else 4096
"""Elements of a program of the backward pass, four warps."""


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """mean of logsumexp(logits) - logits[target] over rows whose target is not `ignore_index`.

    logits (M, V) in bf16, fp16 or fp32 and target (M,) int64 to a scalar in the dtype of logits; computed
    in fp32. NaN where no row counts, or where a target is outside [0, V). Differentiable in logits. Raises
    TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message names the
    argument.
    """
    check("logits", logits, dim=2)
    check("target", target, shape=logits.shape[:1], like=logits, dtypes=(torch.int64,))
    loss: torch.Tensor = _cross_entropy(logits, target, ignore_index)[0]
    return loss


@triton.jit
def _rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    logits,
    target,
    losses,
    lses,
    V,
    stride,
    ignore_index,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Loss and log-sum-exp of one row."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    at = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # Finite, so that the difference of two is never NaN.
    highest = tl.full([LANES], -1.0e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, V, LANES * VECTOR):
        col = start + at
        x = tl.load(logits + col, col < V, float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 1))
        terms = tl.exp2((x - higher[:, None]) * LOG2E)
        total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum(terms, 1)
        highest = higher
    top = tl.max(highest, 0)
    rest = tl.log(tl.sum(total * tl.exp2((highest - top) * LOG2E), 0))
    t = tl.load(target + row)
    hit = tl.load(logits + t, (t >= 0) & (t < V), float("nan")).to(tl.float32)
    # In this order: large logits cancel exactly.
    tl.store(losses + row, tl.where(t == ignore_index, 0.0, (top - hit) + rest))
    tl.store(lses + row, top + rest)


@triton.jit
def _mean(losses, target, loss, share, M, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean loss of the rows that count, and 1 / their number; one program, so that the order is fixed."""
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, M, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(losses + row, row < M, 0.0)
        counts = tl.load(target + row, row < M, ignore_index) != ignore_index
        count += counts.to(tl.float32)
    part = 1.0 / tl.sum(count, 0)
    tl.store(share, part)
    tl.store(loss, (tl.sum(total, 0) * part).to(loss.dtype.element_ty))


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dloss, share, logits, target, lses, dlogits, V, stride, ignore_index, BLOCK: tl.constexpr
):
    """(softmax - one at the target) · dloss / rows that count, for a piece of one row."""
    LOG2E: tl.constexpr = 1.4426950408889634
    pieces = tl.cdiv(V, BLOCK)
    row = tl.program_id(0) // pieces
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    row = row.to(tl.int64)
    t = tl.load(target + row)
    factor = tl.where(t == ignore_index, 0.0, tl.load(dloss).to(tl.float32) * tl.load(share))
    x = tl.load(logits + row * stride + col, col < V, float("-inf")).to(tl.float32)
    value = tl.exp2((x - tl.load(lses + row)) * LOG2E)
    value = tl.where(col == t, value - 1.0, value) * factor
    tl.store(dlogits + row * V + col, value.to(dlogits.dtype.element_ty), col < V)


def _empty(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for loss (), log-sum-exp (M,) and 1 / rows that count ()."""
    return (
        torch.empty((), dtype=logits.dtype, device=logits.device),
        torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device),
        torch.empty((), dtype=torch.float32, device=logits.device),
    )


def _launch(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss, lse, share = _empty(logits, target, ignore_index)
    M, V = logits.shape
    if M == 0 or V == 0:
        return loss.fill_(torch.nan), lse.fill_(-torch.inf), share.fill_(torch.inf)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    target = target.contiguous()
    losses = torch.empty_like(lse)
    vector = 16 // logits.element_size()
    with on(logits):
        _rows[(M,)](
            logits,
            target,
            losses,
            lse,
            V,
            logits.stride(0),
            ignore_index,
            LANES=min(LANES, max(power_of_2(V) // vector, 1)),
            VECTOR=vector,
            num_warps=8,
        )
        _mean[(1,)](losses, target, loss, share, M, ignore_index, BLOCK=min(power_of_2(M), 8192), num_warps=16)
    return loss, lse, share


def _launch_backward(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    share: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    dlogits = dense_like(logits)
    M, V = logits.shape
    if logits.numel() == 0:
        return dlogits
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    with on(logits):
        _gradient[(M * cdiv(V, PIECE),)](
            dloss,
            share,
            logits,
            target.contiguous(),
            lse,
            dlogits,
            V,
            logits.stride(0),
            ignore_index,
            BLOCK=PIECE,
            num_warps=4,
        )
    return dlogits


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.ignore_index = inputs[2]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dloss: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    if dloss is None:
        return None, None, None
    return _cross_entropy_backward(dloss, *ctx.saved_tensors, ctx.ignore_index), None, None


_cross_entropy = operator(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor, Tensor)",
    _launch,
    _empty,
    _save,
    _backward,
)
_cross_entropy_backward = operator(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor lse, Tensor share,"
    " int ignore_index) -> Tensor",
    _launch_backward,
    lambda dloss, logits, target, lse, share, ignore_index: dense_like(logits),
)
