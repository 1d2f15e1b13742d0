"""The gate and up projections of a feed-forward as one product with SwiGLU (Shazeer, arXiv 2002.05202) as its
epilogue.

A dual product: the same rows are multiplied by two weights, each with sums of its own, and the epilogue gates one
by the other. Both weights are read as they are, since in training they change at each step. Where a gradient will
be asked for, the epilogue writes gate and up too, which the backward pass reads; else it writes their gated
product alone. It is for many rows: of up to 16, as a step of decoding has them, `matmul` reads weights faster.

The backward pass is SwiGLU's kernel and four products of cuBLAS: with those of `linear` a training step was slower
on an H200 (`docs/models.md`), and all that is fused with them is addition, which cuBLAS does as well.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from .._common import check, multiprocessors, needs_gradient, operator
from ..activation.swiglu import gradients
from . import _dual as portable
from ._dispatch import SECTION, dual
from .linear import flat, main_grad
from .matmul import matmul_add, on_hopper

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gate_up_swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x @ gate.T) · (x @ up.T), summed and gated in fp32 and rounded once.

    x (…, K), gate and up (N, K), in one of bf16, fp16 and fp32, of any strides, to (…, N). fp32 is multiplied as
    TF32 (10 bits), in the backward pass as PyTorch is set to. Differentiable in all three; `main_grad` of both
    weights counts as `linear` says. The gradient of x is one sum, to which the product of up is added.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message names the
    argument.
    """
    result: torch.Tensor = _gate_up_swiglu(x, gate, up, needs_gradient(x, gate, up))[0]
    return result


def _check(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, preactivations: bool) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has no dimension, expected (…, K)")
    check("gate", gate, dim=2, like=x, dtypes=(x.dtype,))
    if gate.shape[1] != x.shape[-1]:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, expected (N, {x.shape[-1]})")
    check("up", up, shape=gate.shape, like=x, dtypes=(x.dtype,))


def _empty(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, preactivations: bool) -> Three:
    """The gated product, and gate and up of all rows, empty where nobody needs them."""
    N = gate.shape[0]
    before = (math.prod(x.shape[:-1]), N) if preactivations else (0,)
    return x.new_empty(*x.shape[:-1], N), x.new_empty(before), x.new_empty(before)


def _launch(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, preactivations: bool) -> Three:
    _check(x, gate, up, preactivations)
    rows = flat(x)
    found = _empty(x, gate, up, preactivations)
    if found[0].numel() == 0 or rows.shape[1] == 0:
        return tuple(y.zero_() for y in found)  # type: ignore[return-value]  # as many
    written = (found[0].view(-1, len(gate)), *found[1:])[: 3 if preactivations else 1]
    if on_hopper(x):
        _on_hopper(rows, gate, up, written)
    else:
        portable.multiply(rows, gate, up, written)
    return found


def _on_hopper(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, outputs: tuple[torch.Tensor, ...]) -> None:
    from . import _dual_hopper as hopper  # where Gluon may be missing, it is not needed
    from ._matmul_hopper import aligned, mapped

    x, gate, up = map(hopper.loadable, (x, gate, up))
    targets = tuple(y if mapped(y) else aligned(y) for y in outputs)
    schedule = dual(len(x), len(gate), x.shape[1], multiprocessors(x))
    hopper.multiply(x, gate, up, targets, replace(schedule, preactivations=len(outputs) > 1), SECTION)
    for y, target in zip(outputs, targets, strict=True):
        if target is not y:
            y.copy_(target)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, gate, up, _ = inputs
    ctx.save_for_backward(x, gate, up, *output[1:])
    ctx.into = [main_grad(weight) for weight in (gate, up)]


def _backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    x, *weights, gate, up = ctx.saved_tensors
    given = gradients(dout.reshape(gate.shape), gate, up)
    wanted = ctx.needs_input_grad
    dx = None
    if wanted[0]:
        dx = _product(given[0], weights[0])  # dX = dG @ gate
        dx = dx.addmm_(given[1], weights[1]).view(x.shape)  # dX += dU @ up
    rows = flat(x)
    of_weights = [
        _weight_gradient(dy, rows, into) if asked else None
        for dy, into, asked in zip(given, ctx.into, wanted[1:3], strict=True)
    ]
    return dx, *of_weights, None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in their dtype, under autocast too, which leaves alone what is given room."""
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _weight_gradient(dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor | None:
    """dyᵀ @ x of dy (M, N) and x (M, K), or None where it was added to a tensor."""
    if into is None:
        return _product(dy.t(), x)
    if into.dtype == x.dtype:
        into.addmm_(dy.t(), x)
    else:
        matmul_add(into, dy.t(), x)
    return None


_gate_up_swiglu = operator(
    "gate_up_swiglu(Tensor x, Tensor gate, Tensor up, bool preactivations) -> (Tensor, Tensor, Tensor)",
    _launch,
    _empty,
    _save,
    _backward,
    check=_check,
    hidden=2,
)
