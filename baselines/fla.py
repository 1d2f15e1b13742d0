"""flash-linear-attention: the fused modules that its models share, and its linear attention; all Triton."""

from __future__ import annotations

from typing import Any

from ._terms import Call, forcing, forward_only, refusing, sparing

REQUIRES = ("flash-linear-attention", "fla-core", "triton")
DEVICES = ("cuda",)

TOO_WIDE = "doesn't support feature dim >= 64KB"
"""What its norms say of a row of more than 64 KB; of just 64 KB they do take one."""


def rms_norm(case: Any) -> Call:
    """`fla.modules.norm.layernorm.rms_norm`."""
    from fla.modules.norm.layernorm import rms_norm as function

    return refusing(lambda x, weight, eps: function(x, weight, None, eps=eps), saying=TOO_WIDE)


def add_rms_norm(case: Any) -> Call:
    """`rms_norm` with a residual, which it returns updated (`prenorm=True`)."""
    from fla.modules.norm.layernorm import rms_norm as function

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return function(x, weight, None, residual=residual, eps=eps, prenorm=True)

    return refusing(call, saying=TOO_WIDE)


def layer_norm(case: Any) -> Call:
    """`fla.modules.norm.layernorm.layer_norm`."""
    from fla.modules.norm.layernorm import layer_norm as function

    return refusing(lambda x, weight, bias, eps: function(x, weight, bias, eps=eps), saying=TOO_WIDE)


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


def causal_conv1d(case: Any) -> Call:
    """`fla.modules.causal_conv1d`, on tokens of channels; of channels of tokens it takes a strided view.

    Its state holds as many tokens as there are taps, one more than it reads: an initial state is made longer.
    """
    from fla.modules.causal_conv1d import causal_conv1d as function
    from torch.nn.functional import pad

    tokens_last = case.options["layout"] == "bds"
    kind = "silu" if case.options["activation"] == "silu" else None

    def longer(initial_state: Any) -> Any:
        return pad(initial_state if tokens_last else initial_state.transpose(1, 2), (1, 0))

    def call(x: Any, weight: Any, bias: Any, initial_state: Any, activation: str, layout: str) -> Any:
        x = x.transpose(1, 2) if tokens_last else x
        state = None if initial_state is None else longer(initial_state)
        y, _ = function(x, weight, bias, initial_state=state, activation=kind)
        return y.transpose(1, 2) if tokens_last else y

    def conversion(x: Any, weight: Any, bias: Any, initial_state: Any, activation: str, layout: str) -> Any:
        return longer(initial_state)

    checked = refusing(call, AssertionError, ValueError)
    return forcing(checked, conversion) if case.options["initial"] else checked


@forward_only("fla")
def causal_conv1d_update(case: Any) -> Call:
    """`fla.modules.causal_conv1d.causal_conv1d_update`, the state in place."""
    from fla.modules.causal_conv1d import causal_conv1d_update as function

    kind = "silu" if case.options["activation"] == "silu" else None

    def call(x: Any, conv_state: Any, weight: Any, bias: Any, activation: str) -> Any:
        return function(x, conv_state, weight=weight, bias=bias, activation=kind)[0]

    return call


def _gradients_right(case: Any) -> None:
    """Raises `NotImplementedError` where the library would refuse gradients with decay: at the end of a backward
    pass for which it has autotuned, which takes long.
    """
    if case.pass_ == "forward":
        return
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1:
        raise NotImplementedError(
            "it refuses gradients with decay on Hopper with Triton 3.4.0 to 3.7.0, which gets them wrong"
        )


def linear_attention(case: Any) -> Call:
    """`chunk_simple_gla`."""
    from fla.ops.simple_gla import chunk_simple_gla

    _gradients_right(case)

    def call(q: Any, k: Any, v: Any, g: Any, initial_state: Any, return_final_state: bool) -> Any:
        o, state = chunk_simple_gla(
            q, k, v, g, scale=1.0, initial_state=initial_state, output_final_state=return_final_state
        )
        return (o, state) if return_final_state else o

    return refusing(call, AssertionError, ValueError)


def gated_delta_rule(case: Any) -> Call:
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`, of keys that have length 1 already, as its layers call it
    but for that.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    _gradients_right(case)

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, return_final_state: bool) -> Any:
        o, state = chunk_gated_delta_rule(
            q, k, v, g, beta, scale=1.0, initial_state=initial_state, output_final_state=return_final_state
        )
        return (o, state) if return_final_state else o

    return refusing(call, AssertionError, ValueError)


def ssd(case: Any) -> Call:
    """`chunk_simple_gla`, linear attention with one decay a head and position, of which this is a case.

    Queries are C, keys B, values step · x, gates step · A; the steps and D x are left to its user. It knows no
    groups: B and C are laid out for every head.
    """
    from fla.ops.simple_gla import chunk_simple_gla
    from torch.nn.functional import softplus

    if case.options["packed"]:
        raise NotImplementedError("chunk_simple_gla takes packed sequences by their offsets, in a batch of one")
    _gradients_right(case)
    groups = case.axes["H"] // max(1, case.axes["G"])

    def spread(B: Any, C: Any) -> Any:
        return tuple(t.repeat_interleave(groups, 2) for t in (B, C)) if groups > 1 else (B, C)

    def call(
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        dt_bias: Any,
        initial_state: Any,
        seq_idx: Any,
        dt_softplus: bool,
        return_final_state: bool,
    ) -> Any:
        step = dt.float() + dt_bias
        step = softplus(step) if dt_softplus else step
        keys, queries = spread(B, C)
        y, state = chunk_simple_gla(
            queries,
            keys,
            (x * step[..., None]).to(x.dtype),
            step * A,
            scale=1.0,
            initial_state=initial_state,
            output_final_state=return_final_state,
            state_v_first=True,
        )
        y = (y + x * D[:, None]).to(x.dtype)
        return (y, state) if return_final_state else y

    def conversion(B: Any, C: Any, **rest: Any) -> Any:
        return spread(B, C)

    checked = refusing(call, AssertionError, ValueError)
    return forcing(checked, conversion) if groups > 1 else checked


IMPLEMENTATIONS = {
    "add_rms_norm": {"fla": add_rms_norm},
    "causal_conv1d": {"fla": causal_conv1d},
    "causal_conv1d_update": {"fla": causal_conv1d_update},
    "cross_entropy": {"fla": cross_entropy},
    "fused_linear_cross_entropy": {"fla": fused_linear_cross_entropy},
    "gated_delta_rule": {"fla": gated_delta_rule},
    "layer_norm": {"fla": layer_norm},
    "linear_attention": {"fla": linear_attention},
    "rms_norm": {"fla": rms_norm},
    "rope": {"fla": rope},
    "ssd": {"fla_simple_gla": ssd},
    "swiglu": {"fla": swiglu},
}
