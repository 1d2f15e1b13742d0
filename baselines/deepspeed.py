"""DeepSpeed: its fused Adam, and its Triton operators for Hugging Face models."""

from __future__ import annotations

from typing import Any

from ._terms import Call, forcing

REQUIRES = ("deepspeed",)
ENVIRONMENT = "deepspeed"
DEVICES = ("cuda",)


def rms_norm(case: Any) -> Call:
    """`fused_rms_norm`, of rows of at most 2048."""
    from deepspeed.ops.triton_ops.fused_rms_norm import fused_rms_norm

    if case.axes["D"] > 2048:
        raise NotImplementedError("fused_rms_norm takes rows of at most 2048")
    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("fused_rms_norm takes fp16 and bf16 only")
    return lambda x, weight, eps: fused_rms_norm(x, weight, eps)


def swiglu(case: Any) -> Call:
    """`deepspeed.ops.triton_ops.swiglu_triton.swiglu`."""
    from deepspeed.ops.triton_ops.swiglu_triton import swiglu as function

    return lambda gate, up: function(gate, up)


def rope(case: Any) -> Call:
    """`fused_apply_rotary_pos_emb`, Hugging Face's form: cos and sin are doubled to it inside the call."""
    import torch
    from deepspeed.ops.triton_ops.fused_rotary_pos_emb import fused_apply_rotary_pos_emb

    if case.options["layout"] != "half":
        raise NotImplementedError("fused_apply_rotary_pos_emb has the half layout only")
    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("fused_apply_rotary_pos_emb takes fp16 and bf16 only")

    def conversion(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        return tuple(torch.cat((x, x), -1)[None] for x in (cos, sin))

    def call(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        return fused_apply_rotary_pos_emb(q, k, *conversion(q, k, cos, sin, layout))

    return forcing(call, conversion)


def adamw(case: Any) -> Call:
    """The kernel of `deepspeed.ops.adam.FusedAdam`, compiled with nvcc at its first use.

    As with PyTorch's, the optimizer's own work around it on the host is left out.
    """
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.adam.fused_adam import multi_tensor_applier

    if case.options["state"] != "plain":
        raise NotImplementedError("FusedAdam keeps its moments in the parameters' dtype and no masters")
    optimizer: Any = None

    def call(
        params: Any,
        grads: Any,
        exp_avgs: Any,
        exp_avg_sqs: Any,
        masters: Any,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        nonlocal optimizer
        if optimizer is None:
            optimizer = FusedAdam(params)
        multi_tensor_applier(
            optimizer.multi_tensor_adam,
            optimizer._dummy_overflow_buf,
            [grads, params, exp_avgs, exp_avg_sqs],
            lr, beta1, beta2, eps, step, optimizer.adam_w_mode, 1, weight_decay,
        )  # fmt: skip

    return call


IMPLEMENTATIONS = {
    "adamw": {"deepspeed": adamw},
    "rms_norm": {"deepspeed": rms_norm},
    "rope": {"deepspeed": rope},
    "swiglu": {"deepspeed": swiglu},
}
