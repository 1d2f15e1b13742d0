"""Attention, forward and backward: FlashAttention-2 (Dao, arXiv 2307.08691) in Triton.

The forward pass (`_portable_forward.py`) walks the keys once with an online softmax in base 2 and keeps, beside
the output, one log-sum-exp a row. The backward pass (`_portable_backward.py`) computes the probabilities again
from it, in one kernel over blocks of keys (dK, dV) and one over blocks of queries (dQ): no atomics, so that
gradients are the same in every run. On Hopper one kernel makes all three (`_attention_hopper_backward.py`), and
parts of dQ are added up in no fixed order, unless PyTorch is asked for deterministic algorithms.

A sliding window (Beltagy et al., arXiv 2004.05150) bounds both walks: blocks outside it are never visited, and of
those inside only the ones that its edges cut are masked.

Inputs may have any strides with a contiguous last dimension. From compute capability 9.0 on, long sequences
whose strides are multiples of 16 bytes are loaded by the tensor memory accelerator; everything else through
pointers, by the same kernels. `_dispatch.py` says which kernels run.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch

from .._common import check, choice, on, operator
from .._launch import prepared
from ._dispatch import (
    launch_forward,
    like_sinks,
    prepare_backward,
    prepare_forward,
    prepare_packed,
    prepare_packed_backward,
    thirds,
)
from ._tile_functions import LOG2E
from ._tiling import like, output_like


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = ...,
    window: int | None = ...,
    return_lse: Literal[False] = ...,
    sinks: torch.Tensor | None = ...,
    cap: float = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = ...,
    window: int | None = ...,
    *,
    return_lse: Literal[True],
    sinks: torch.Tensor | None = ...,
    cap: float = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = "causal",
    window: int | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ / √D)·v of q (B, H, S, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv): (B, H, S, Dv), in q's dtype,
    stored in the order of q's dimensions, the last one contiguous.

    All three in one of bf16, fp16, fp32, on one device; D and Dv from 1 to 256; Hkv divides H, and query head h
    reads key head h // (H / Hkv). The last query and the last key are in one place: `mask` "causal" hides the keys
    after a query, so that query i sees the first Sk - S + i + 1, none where that is not positive. A `window` of
    w, at least 1, hides those w or more places away: a query sees the key in its place and the w - 1 before it,
    and under a "full" mask the w - 1 after it. Sums are in fp32; fp32 inputs are multiplied as fp32, not TF32.

    A `cap` above 0 makes scores cap · tanh(score / cap), before the mask; one above 1,000 is the portable
    kernels'. `sinks` (H,), in bf16, fp16 or fp32, are one more logit a head in the softmax's denominator, which
    has no value and no cap. Gradients with a cap are the portable kernels' where Dv is not D, or D at most 128
    and they are to be deterministic. On Hopper tanh of bf16 inputs has a relative error of up to 2^-11.

    With `return_lse`, (output, lse): lse (B, H, S), fp32, is the natural logarithm of the sum of exponentials of
    each row's visible scores, its sink among them, by which outputs over several sets of keys can be merged into
    that over all.

    Differentiable once in q, k, v and sinks, through the output and through lse. The same inputs give the same
    bits on the same device, but for the gradient in q on Hopper (compute capability 9.0): it is summed in no fixed
    order, as that of PyTorch's own attention is. Where `torch.use_deterministic_algorithms(True)` holds when
    gradients are computed, it is deterministic too, by kernels that take 1.2 to 1.6 times as long
    (docs/attention.md).

    A row that sees no key, or whose scores are all -inf, as keys with -inf in them can make them, gives zeros,
    an lse of -inf and zero gradients in k and v; the gradient in q of such keys is 0·inf = NaN, as PyTorch's
    is. A score of NaN or +inf, of the inputs or overflowed in fp32, gives NaN in its row.

    Raises `TypeError` for a wrong dtype or a window that is no integer, and `ValueError` for a wrong shape,
    device, mask, window or cap.
    """
    choice("mask", mask, ("causal", "full"))
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"window must be an integer or None, not {type(window).__name__}")
        if window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
    output, level = _attention(q, k, v, mask == "causal", window or 0, sinks, float(cap))
    if not return_lse:
        found: torch.Tensor = output
        return found
    return output, _natural(level)


def attention_packed(projected: torch.Tensor, mask: Literal["causal", "full"] = "causal") -> torch.Tensor:
    """`attention` of queries, keys and values that one projection left beside each other: of (B, S, 3, H, D), the
    output (B, S, H, D). Its gradient lies as the input does, so that none of the three is copied in either pass:
    gradients of views of a projection are put together by a copy of all three.

    Raises as `attention` does.
    """
    choice("mask", mask, ("causal", "full"))
    found: torch.Tensor = _packed(projected, mask == "causal")[0]
    return found


def attention_into(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """Writes `attention` of q, k, v to `out`, of the output's shape and dtype, its last dimension contiguous, and
    gives its log-sum-exp. It may be a part of a larger tensor. Not differentiable.

    Raises as `attention` does, for `out` as well.
    """
    choice("mask", mask, ("causal", "full"))
    _check(q, k, v, mask == "causal", 0, None, 0.0)
    check("out", out, dtypes=(q.dtype,), shape=(*q.shape[:3], v.shape[3]), like=q)
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ValueError("out must have a contiguous last dimension")
    with on(q):
        return _natural(launch_forward(q, k, v, mask == "causal", out=out)[1])


def _natural(level: torch.Tensor) -> torch.Tensor:
    """The kernels' log-sum-exp is in base 2, and +inf for a row that sees nothing: 2^(score - level) is 0 then."""
    return torch.where(level == math.inf, -math.inf, level / LOG2E)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int,
    sinks: torch.Tensor | None,
    cap: float,
) -> None:
    """Raises what `attention` says."""
    check("q", q, dim=4)
    B, H, _, D = q.shape
    if not 1 <= D <= 256:
        raise ValueError(f"q has head dimension {D}, expected 1 to 256")
    check("k", k, dim=4, dtypes=(q.dtype,), like=q)
    heads, Sk = k.shape[1:3]
    if H and (heads == 0 or H % heads):
        raise ValueError(f"k has {heads} heads, which do not divide the {H} of q")
    check("k", k, shape=(B, heads, Sk, D))
    check("v", v, dim=4, dtypes=(q.dtype,), like=q)
    Dv = v.shape[3]
    if not 1 <= Dv <= 256:
        raise ValueError(f"v has head dimension {Dv}, expected 1 to 256")
    check("v", v, shape=(B, heads, Sk, Dv))
    if sinks is not None:
        check("sinks", sinks, shape=(H,), like=q)
    if not 0 <= cap < math.inf:
        raise ValueError(f"cap is {cap}, expected a number above 0, or 0 for none")


def _check_packed(projected: torch.Tensor, causal: bool) -> None:
    """Raises what `attention_packed` says."""
    check("projected", projected, dim=5)
    if projected.shape[2] != 3:
        raise ValueError(f"projected has shape {tuple(projected.shape)}, expected (B, S, 3, H, D)")
    _check(*thirds(projected), causal, 0, None, 0.0)


# ---------------------------------------------------------------------------------------------------------
# Autograd.


def attention_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: Literal["causal", "full"] = "causal",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) of `attention` over several sets of keys, as far as k and v, one of these sets, have a part in
    them: dK and dV are theirs, and dQ adds up over the sets. `grad` is that of `out`.

    `out` and the natural log-sum-exp `lse` are over all sets; `mask` is that between q and this one. All as
    `attention` takes and gives them.
    """
    level = torch.where(lse == -math.inf, math.inf, lse * LOG2E)
    dq, dk, dv, _ = _gradients(grad, q, k, v, out, level, mask == "causal", 0, None, None, 0.0)
    return dq, dk, dv


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.causal, ctx.window, sinks, ctx.cap = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks)


def _differentiate(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    if grad is None and grad_lse is None:
        return (None,) * 7
    *saved, sinks = ctx.saved_tensors
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    dq, dk, dv, ds = _gradients(grad, *saved, ctx.causal, ctx.window, grad_lse, sinks, ctx.cap)
    return dq, dk, dv, None, None, None if sinks is None else ds, None


_attention = operator(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, int window, Tensor? sinks, float cap)"
    " -> (Tensor, Tensor)",
    prepared(prepare_forward, _check),
    lambda q, k, v, *_: (output_like(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)),
    _save,
    _differentiate,
    _check,
)

_gradients = operator(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal,"
    " int window, Tensor? grad_lse, Tensor? sinks, float cap) -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(prepare_backward),
    lambda grad, q, k, v, out, lse, causal, window, grad_lse, sinks, cap: (
        like(q),
        like(k),
        like(v),
        like_sinks(q, sinks),
    ),
)


def _save_packed(ctx: Any, inputs: Any, output: Any) -> None:
    projected, ctx.causal = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(projected, *output)


def _differentiate_packed(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[Any, None]:
    return None if grad is None else _packed_gradients(grad, *ctx.saved_tensors, ctx.causal), None


def _empty_packed(projected: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    B, S, _, H, D = projected.shape
    return projected.new_empty(B, S, H, D), projected.new_empty(B, H, S, dtype=torch.float32)


_packed = operator(
    "attention_packed(Tensor projected, bool causal) -> (Tensor, Tensor)",
    prepared(prepare_packed, _check_packed),
    _empty_packed,
    _save_packed,
    _differentiate_packed,
    _check_packed,
    hidden=1,
)

_packed_gradients = operator(
    "attention_packed_backward(Tensor grad, Tensor projected, Tensor out, Tensor lse, bool causal) -> Tensor",
    prepared(prepare_packed_backward),
    lambda grad, projected, *_: projected.new_empty(projected.shape),
)
