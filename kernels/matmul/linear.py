"""A linear layer of a model: a product forward, two backward, of which the weight's may be added to its gradient
where that lies.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._common import FLOATING, check, operator
from ._columns import sums_of_columns
from ._lookup import add_rows as add_rows
from .matmul import matmul, matmul_add


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
    _check(x, weight, bias)
    return shaped(matmul(flat(x), weight.t(), bias), *x.shape[:-1], weight.shape[0])


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


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.into = main_grad(weight)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    given = flat(dy)
    wanted = ctx.needs_input_grad
    dx = matmul(given, weight).view(x.shape) if wanted[0] else None
    dweight = weight_gradient(given, flat(x), ctx.into) if wanted[1] else None
    return dx, dweight, sums_of_columns(given) if wanted[2] else None


_linear = operator(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _launch, _empty, _save, _backward, check=_check
)
