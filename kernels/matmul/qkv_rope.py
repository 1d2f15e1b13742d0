"""Queries, keys and values of one input, the first two turned by rotary positions (Su et al., arXiv 2104.09864),
in the order in which attention reads them.

Hopper's product can turn what it writes. On an H200 that was faster than a kernel behind it for heads of 64, and
slower for heads of 128, where each consumer waits for the tables of its own columns: `FASTER` says which heads are
turned so, `qkv_rope_fused` turns all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .._common import FLOATING, check, multiprocessors, operator
from ..position.rope import rope, turned_back
from . import _few_rows as few_rows
from ._dispatch import SIXTEEN, Choice, candidates, choice, choose, estimate, tiles
from ._schedules import CHUNK
from .linear import main_grad, shaped, weight_gradient
from .matmul import matmul, matmul_add, on_hopper

HEADS = (64, 128, 256)
"""Head dimensions whose halves are columns that are written at a time, or several of them."""
FASTER = (64,)
"""Those that the product turned faster than a kernel behind it."""


def qkv_rope(
    x: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) = x times the three weights, q and k with each pair (a, b) of dimensions i and i + D / 2 of a head
    turned to (a · cos - b · sin, b · cos + a · sin), in fp32 and rounded once.

    x (B, S, K), query (H · D, K), key and value (Hkv · D, K), cos and sin (S, D / 2), in one of bf16 and fp16, to
    q (B, H, S, D), k and v (B, Hkv, S, D), which lie in memory in the order B, S, H, D. Differentiable in x and
    the weights, whose `main_grad` counts as `linear` says. The gradient of x is one sum, to which the products of
    keys and values are added.

    On Hopper, where D is one of `FASTER`, the products of q and k turn what they write; elsewhere a kernel does
    after them. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message
    names the argument.
    """
    fused = isinstance(cos, torch.Tensor) and cos.dim() == 2 and 2 * cos.shape[1] in FASTER
    q, k, v = _qkv_rope(x, query, key, value, cos, sin, fused)
    return _heads(q, x, cos), _heads(k, x, cos), _heads(v, x, cos)


def qkv_rope_fused(
    x: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qkv_rope` whose products turn what they write for every D that they can: 64, 128 and 256, on Hopper."""
    q, k, v = _qkv_rope(x, query, key, value, cos, sin, True)
    return _heads(q, x, cos), _heads(k, x, cos), _heads(v, x, cos)


def _check(
    x: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    fused: bool,
) -> None:
    check("x", x, dim=3, dtypes=FLOATING[:2])
    check("cos", cos, dim=2, like=x, dtypes=(x.dtype,))
    check("cos", cos, shape=(x.shape[1], cos.shape[1]))
    check("sin", sin, shape=cos.shape, like=x, dtypes=(x.dtype,))
    for name, weight in (("query", query), ("key", key), ("value", value)):
        check(name, weight, dim=2, like=x, dtypes=(x.dtype,))
        if weight.shape[1] != x.shape[2] or cos.shape[1] == 0 or weight.shape[0] % (2 * cos.shape[1]):
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}, expected heads of {2 * cos.shape[1]} and {x.shape[2]}"
            )


def _empty(x: torch.Tensor, *weights: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(*x.shape[:2], weight.shape[0]) for weight in weights[:3])


def _chosen(M: int, N: int, K: int, head: int, programs: int) -> Choice:
    """As of a product that turns nothing, but that a tile has whole heads."""
    found = choose(SIXTEEN, M, N, K, False, programs)
    if found.schedule.columns % head == 0:
        return found
    some = [x for x in candidates(SIXTEEN, False) if x.columns % head == 0]
    best = min(some, key=lambda x: estimate(x, M, N, K, programs))
    count = tiles(best, M, N)
    return choice(best, count, count, found.section)


def turns(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the product for Hopper turns what it writes."""
    if (
        not on_hopper(x)
        or 2 * cos.shape[1] not in HEADS
        or few_rows.takes(x, weight)
        or 0 in (*x.shape, len(weight))
    ):
        return False
    from . import _matmul_hopper as hopper

    return all(map(hopper.mapped, (x, weight, cos, sin)))


def _turned(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (B · S, K) times a weight (H · D, K), each head turned by its row's position."""
    from . import _matmul_hopper as hopper

    head = 2 * cos.shape[1]
    out = x.new_empty(x.shape[0], weight.shape[0])
    chosen = _chosen(*out.shape, x.shape[1], head, multiprocessors(x))
    schedule = replace(
        chosen.schedule,
        a_turned=hopper.turned(x),
        b_turned=hopper.turned(weight),
        written=min(CHUNK, head // 2),
        head=head,
    )
    hopper.multiply(x, weight, out, schedule, chosen.dealt, chosen.section, cos, sin, split=chosen.split)
    return out


def _launch(
    x: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    fused: bool,
) -> tuple[torch.Tensor, ...]:
    _check(x, query, key, value, cos, sin, fused)
    B, S, K = x.shape
    rows = x.reshape(B * S, K)
    cos, sin = cos.contiguous(), sin.contiguous()
    v = matmul(rows, value.t())
    if fused and all(turns(rows, weight, cos, sin) for weight in (query, key)):
        q, k = (_turned(rows, weight, cos, sin) for weight in (query, key))
    else:
        q, k = (_heads(matmul(rows, weight.t()), x, cos) for weight in (query, key))
        q, k = (y.transpose(1, 2) for y in rope(q, k, cos, sin))
    weights = (query, key, value)
    return tuple(shaped(y, B, S, len(weight)) for y, weight in zip((q, k, v), weights, strict=True))


def _heads(y: torch.Tensor, x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """(…, H · D) of B · S rows as (B, H, S, D), where it lies."""
    D = 2 * cos.shape[1]
    return y.view(*x.shape[:2], y.shape[-1] // D, D).transpose(1, 2)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.into = [main_grad(weight) for weight in inputs[1:4]]


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[Any, ...]:
    x, *weights, cos, sin = ctx.saved_tensors
    B, S, K = x.shape
    dq, dk = (_heads(y.contiguous(), x, cos) for y in (dq, dk))
    dq, dk = (y.transpose(1, 2) for y in turned_back(dq, dk, cos, sin))
    given = [y.reshape(B * S, len(weight)) for y, weight in zip((dq, dk, dv), weights, strict=True)]
    wanted = ctx.needs_input_grad
    dx = None
    if wanted[0]:
        dx = matmul(given[0], weights[0])
        for dy, weight in zip(given[1:], weights[1:], strict=True):
            matmul_add(dx, dy, weight)
        dx = dx.view(x.shape)
    rows = x.reshape(B * S, K)
    gradients = [
        weight_gradient(dy, rows, into) if asked else None
        for dy, into, asked in zip(given, ctx.into, wanted[1:4], strict=True)
    ]
    return dx, *gradients, None, None, None


_qkv_rope = operator(
    "qkv_rope(Tensor x, Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, bool fused)"
    " -> (Tensor, Tensor, Tensor)",
    _launch,
    _empty,
    _save,
    _backward,
    check=_check,
)
