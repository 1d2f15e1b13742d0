"""A step of AdamW (Loshchilov and Hutter, arXiv 1711.05101) over all tensors of a model, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...registry.store.record import Case
from ..operator import BYTES, TOLERANCES, Inputs, Operator, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

STEP = 10
"""The step's number: late enough for moments, so early that both of their corrections count."""

HYPERPARAMETERS = {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 5e-4, "weight_decay": 1.0}
"""Large, beside parameters of 0.1, so that decay and update each weigh more than the rounding of bf16; and eps
beside roots of 0.01, so that its absence or another place of it shows."""

STATES = {"plain": (None, None), "master32": (4, 4), "master16": (4, 2)}
"""Bytes of a master copy and of a moment, of each option of `state`; None: no master, moments like the
parameters."""


def shapes(case: Case) -> list[tuple[int, ...]]:
    """T shapes: all (D, D), or one after the other those of a decoder layer of Llama 3 with model width D.

    Such a layer has queries and output (D, D), keys and values (D/4, D), the gate, up and down projections
    with a width of 3.5 D, and two norms (D,).
    """
    T, D = case.axes["T"], case.axes["D"]
    kv, wide = max(D // 4, 1), 7 * D // 2
    layer = [(D, D), (kv, D), (kv, D), (D, D), (wide, D), (wide, D), (D, wide), (D,), (D,)]
    return [layer[i % len(layer)] for i in range(T)] if case.options["sizes"] == "llama" else [(D, D)] * T


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Lists of T tensors: params and grads in the case's dtype, moments and masters as option `state` has it.

    plain: moments in the dtype of the parameters. master32: fp32 masters and moments. master16: fp32 masters,
    bf16 moments. The moments are what ten steps of such gradients leave, about; no second moment is near to 0,
    where a step would be arbitrarily large. Raises NotImplementedError for masters beside fp32 parameters.
    """
    import torch

    dtype = torch_dtype(case.dtype)
    state = case.options["state"]
    if case.dtype == "fp32" and state != "plain":
        raise NotImplementedError("fp32 parameters are their own masters")
    moment = {"plain": dtype, "master32": torch.float32, "master16": torch.bfloat16}[str(state)]
    like: dict[str, Any] = {"device": device, "generator": generator}

    def normal(scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.randn(x, **like, dtype=dtype).mul_(scale) for x in shapes(case)]

    masters = None if state == "plain" else normal(0.1, torch.float32)
    return {
        "params": normal(0.1, dtype) if masters is None else [x.to(dtype) for x in masters],
        "grads": normal(1e-2, dtype),
        "exp_avgs": normal(5e-3, moment),
        "exp_avg_sqs": [torch.rand(x, **like, dtype=moment).add_(0.5).mul_(1e-6) for x in shapes(case)],
        "masters": masters,
        "step": STEP,
        **HYPERPARAMETERS,
    }


def reference(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor] | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[torch.Tensor, ...]:
    """New params, first and second moments and, where there are any, masters, one after the other."""
    new: list[list[torch.Tensor]] = [[], [], []]
    for p, g, m, v in zip(masters or params, grads, exp_avgs, exp_avg_sqs, strict=True):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        root = (v / (1 - beta2**step)).sqrt() + eps
        p = p * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / root
        for values, value in zip(new, (p, m, v), strict=True):
            values.append(value)
    return (*new[0], *new[1], *new[2], *(new[0] if masters else ()))


def results(result: Any, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The inputs that the call has updated, in the reference's order, whatever it returned."""
    lists = (inputs[name] for name in OPERATOR.in_place)
    return tuple(x for tensors in lists for x in tensors or ())


def bytes_(case: Case) -> int:
    """Reads gradients, moments and masters or parameters; writes moments, parameters and masters.

    A parameter costs 14 bytes plain in bf16 and 28 in fp32, 28 with master32 and 20 with master16 beside bf16.
    """
    own = BYTES[case.dtype]
    master, moment = STATES[str(case.options["state"])]
    each = own + 2 * 2 * (moment or own) + own + (2 * master if master else own)
    size = 0
    for shape in shapes(case):
        elements = 1
        for x in shape:
            elements *= x
        size += elements
    return size * each


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="adamw",
    summary="one AdamW step over many tensors, in place",
    axes={"T": "tensors", "D": "model width"},
    options={"sizes": ("equal", "llama"), "state": tuple(STATES)},
    # Not fp16: second moments of its gradients are below its smallest number.
    dtypes=("bf16", "fp32"),
    inputs=inputs,
    reference=reference,
    results=results,
    bytes=bytes_,
    flops=flops,
    in_place=("params", "exp_avgs", "exp_avg_sqs", "masters"),
    # fp32 holds 0.999 to 1.3e-8, which is allowed: FusedAdam and others take beta2 as fp32. Ten steps of that and
    # 4 units of the last place for the power (CUDA's powf) leave 1 - beta2**step, 0.01, off by 4e-5, and its root
    # by half, of which parameters get a third, their update's share: 6e-6 at most, 2e-6 with an exact power.
    # Second moments are off by 2e-6, from 1 - beta2. An element's update is up to 3 times the parameters' size.
    tolerances={**TOLERANCES, "fp32": Tolerance(norm=6e-6, absolute=5e-5, relative=5e-5)},
    plans={
        "quick": (grid("forward", T=8, D=4096),),
        "quick_cpu": (grid("forward", T=4, D=512, dtypes="fp32"),),
        "standard": (
            grid("forward", T=32, D=4096, options={"state": list(STATES)}),
            grid("forward", T=32, D=4096, dtypes="fp32"),
            grid("forward", T=288, D=[128, 1024], options={"sizes": "llama"}),
        ),
        "full": (
            grid("forward", T=288, D=1024, options={"sizes": "llama", "state": ["master32", "master16"]}),
            grid("forward", T=1, D=[1024, 16384]),
            grid("forward", T=288, D=1023, options={"sizes": "llama"}, dtypes=["bf16", "fp32"]),
        ),
    },
)
