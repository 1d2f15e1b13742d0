"""A linear layer of a model: a product forward, two backward, of which the weight's may be added to its gradient
where that lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .._common import FLOATING, check, operator
from .._launch import prepared, room, room_like
from ._columns import sums_of_columns
from ._lookup import add_rows as add_rows
from .matmul import matmul, matmul_add, planned

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""In x, weight and bias; of nothing where one is not asked for."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, summed in fp32 and rounded once.

    x (…, K), weight (N, K) and bias (N,) in one of bf16 and fp16 to (…, N). Differentiable in all three.

    A weight may have an attribute `main_grad`, a contiguous tensor of its shape in its dtype or fp32. The backward
    pass then adds the weight's gradient to it in the product (`matmul_add`), and gives autograd none: what is
    called at a parameter's gradient, hooks say, is not called. So micro-batches need no additions of their own.
    Graphs of torch.compile do not know of the attribute: their gradient goes to autograd.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message names the
    argument.
    """
    result: torch.Tensor = _linear(x, weight, bias)
    return result


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check("x", x, dtypes=FLOATING[:2])
    check("weight", weight, dim=2, like=x, dtypes=(x.dtype,))
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (…, {weight.shape[1]})")
    if bias is not None:
        check("bias", bias, shape=weight.shape[:1], like=x, dtypes=(x.dtype,))


def _empty(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return shaped(matmul(flat(x), weight.t(), bias), *x.shape[:-1], weight.shape[0])


def _prepare(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """`_launch` of all inputs that are alike."""
    rows, like = flat(x), _empty(x, weight, bias)
    multiply = planned(rows, weight.t(), flat(like), bias) if rows.data_ptr() == x.data_ptr() else None
    if multiply is None:
        return _launch
    made = room_like(like)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = made()
        multiply(x, weight, y, bias)
        return y

    return run


def shaped(result: torch.Tensor, *shape: int) -> torch.Tensor:
    """A result in another shape that autograd takes for no view: it refuses to change in place what a function
    gives as one, as in `linear(x, weight).add_(y)`.
    """
    found: torch.Tensor = torch.ops.aten._unsafe_view(result, shape)
    return found


def flat(x: torch.Tensor) -> torch.Tensor:
    """(…, K) as (M, K), of K = 0 as well; rows that do not lie dense are multiplied as they lie."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Where a weight's gradient is to be added, if it says so."""
    found = getattr(weight, "main_grad", None)
    if found is not None:
        check("weight.main_grad", found, shape=weight.shape, like=weight, dtypes=(weight.dtype, torch.float32))
    return found


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
    """dyᵀ @ x of dy (M, N) and x (M, K), or None where it was added to a tensor."""
    if into is None:
        return matmul(dy.t(), x)
    matmul_add(into, dy.t(), x)
    return None


def _gradients_of(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, of_x: bool, of_weight: bool, of_bias: bool
) -> Gradients:
    given = flat(dy)
    dx = matmul(given, weight).view(x.shape) if of_x else x.new_empty(0)
    dweight = matmul(given.t(), flat(x)) if of_weight else x.new_empty(0)
    return dx, dweight, sums_of_columns(given) if of_bias else x.new_empty(0)


def _empty_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, of_x: bool, of_weight: bool, of_bias: bool
) -> Gradients:
    return (
        x.new_empty(x.shape if of_x else 0),
        x.new_empty(weight.shape if of_weight else 0),
        x.new_empty(weight.shape[:1] if of_bias else 0),
    )


def _prepare_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, of_x: bool, of_weight: bool, of_bias: bool
) -> Callable[..., Gradients]:
    """`_gradients_of` of all tensors that are alike."""
    given, rows = flat(dy), flat(x)
    if given.data_ptr() != dy.data_ptr() or rows.data_ptr() != x.data_ptr():
        return _gradients_of
    like_x, like_weight, _ = _empty_gradients(dy, x, weight, True, True, False)
    to_x, to_weight = planned(given, weight, flat(like_x)), planned(given.t(), rows, like_weight)
    if to_x is None or to_weight is None:
        return _gradients_of
    of_dx, of_dweight, nothing = room_like(like_x), room_like(like_weight), room((0,), x.dtype, x.device)

    def run(
        dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, of_x: bool, of_weight: bool, of_bias: bool
    ) -> Gradients:
        dx, dweight = of_dx() if of_x else nothing(), of_dweight() if of_weight else nothing()
        if of_x:
            to_x(dy, weight, dx, None)
        if of_weight:
            to_weight(dy, x, dweight, None)
        return dx, dweight, sums_of_columns(flat(dy)) if of_bias else nothing()

    return run


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.into = main_grad(weight)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    # The last three: of a call that is prepared autograd knows one argument more.
    of_x, of_weight, of_bias = ctx.needs_input_grad[-3:]
    added = of_weight and ctx.into is not None
    dx, dweight, dbias = _gradients(dy, x, weight, of_x, of_weight and not added, of_bias)
    if added:
        matmul_add(ctx.into, flat(dy).t(), flat(x))
    return dx if of_x else None, dweight if of_weight and not added else None, dbias if of_bias else None


_linear = operator(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    prepared(_prepare, _check),
    _empty,
    _save,
    _backward,
    check=_check,
)

_gradients = operator(
    "linear_backward(Tensor dy, Tensor x, Tensor weight, bool of_x, bool of_weight, bool of_bias)"
    " -> (Tensor, Tensor, Tensor)",
    prepared(_prepare_gradients),
    _empty_gradients,
)
