"""flash-linear-attention's fused modules: Triton kernels that its models share."""

from __future__ import annotations

from typing import Any

from ._terms import Call, forcing, refusing, sparing

REQUIRES = ("flash-linear-attention", "fla-core", "triton")
DEVICES = ("cuda",)


def rms_norm(case: Any) -> Call:
    """`fla.modules.norm.layernorm.rms_norm`."""
    from fla.modules.norm.layernorm import rms_norm as function

    return lambda x, weight, eps: function(x, weight, None, eps=eps)


def add_rms_norm(case: Any) -> Call:
    """`rms_norm` with a residual, which it returns updated (`prenorm=True`)."""
    from fla.modules.norm.layernorm import rms_norm as function

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return function(x, weight, None, residual=residual, eps=eps, prenorm=True)

    return call


def layer_norm(case: Any) -> Call:
    """`fla.modules.norm.layernorm.layer_norm`."""
    from fla.modules.norm.layernorm import layer_norm as function

    return lambda x, weight, bias, eps: function(x, weight, bias, eps=eps)


def swiglu(case: Any) -> Call:
    """`fla.modules.activations.swiglu`."""
    from fla.modules.activations import swiglu as function

    return lambda gate, up: function(gate, up)


def rope(case: Any) -> Call:
    """`fla.modules.rotary.ops.rotary_embedding` of q and of k.

    It takes (B, S, H, D) and copies our order to that itself, forward and backward.
    """
    from fla.modules.rotary.ops import rotary_embedding

    interleaved = case.options["layout"] == "interleaved"

    def call(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        return tuple(
            rotary_embedding(x.transpose(1, 2), cos, sin, interleaved=interleaved).transpose(1, 2) for x in (q, k)
        )

    def conversion(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        return tuple(x.detach().transpose(1, 2).contiguous() for x in (q, k))

    return refusing(forcing(call, conversion), AssertionError)


def cross_entropy(case: Any) -> Call:
    """`fla.modules.FusedCrossEntropyLoss`."""
    from fla.modules import FusedCrossEntropyLoss

    if case.options["regularized"]:

        def regularized(logits: Any, target: Any, label_smoothing: float, z_loss: float) -> Any:
            return FusedCrossEntropyLoss(label_smoothing=label_smoothing, lse_square_scale=z_loss)(logits, target)

        return regularized
    loss = FusedCrossEntropyLoss()
    return lambda logits, target: loss(logits, target)


def fused_linear_cross_entropy(case: Any) -> Call:
    """`fused_linear_cross_entropy_loss`: logits in chunks, both gradients made in the forward pass."""
    from fla.modules.fused_linear_cross_entropy.ops import fused_linear_cross_entropy_loss

    def call(x: Any, weight: Any, target: Any) -> Any:
        return fused_linear_cross_entropy_loss(x, target, weight)

    # Backward alone scales the gradients that forward left, in place: a second one would scale them again.
    return sparing(call) if case.pass_ == "backward" else call


IMPLEMENTATIONS = {
    "add_rms_norm": {"fla": add_rms_norm},
    "cross_entropy": {"fla": cross_entropy},
    "fused_linear_cross_entropy": {"fla": fused_linear_cross_entropy},
    "layer_norm": {"fla": layer_norm},
    "rms_norm": {"fla": rms_norm},
    "rope": {"fla": rope},
    "swiglu": {"fla": swiglu},
}
