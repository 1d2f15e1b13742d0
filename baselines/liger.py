"""Liger-Kernel's functional interface (Hsu et al., arXiv 2410.10989), its Triton kernels.

Its backward passes write their results over what they read: over the gate and up of a feed-forward block, the
logits of a loss. In training, and so in a case that is part of a program, those are dead by then; else they are
inputs, and a gradient is asked for more than once. So those calls make a copy of just that, named as
`conversion`. The norms have an option to write elsewhere (`in_place=False`), which is used.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call, forcing, refusing, sparing

REQUIRES = ("liger-kernel", "triton")
DEVICES = ("cuda",)

KEPT = ("forward", "program")
"""Passes in which nobody reads again what it overwrites."""
TOO_WIDE = "exceeds the recommended Triton blocksize"
"""What it says of rows longer than one block, of 65536 elements; all but rope and the losses hold a row in one."""


def rms_norm(case: Any) -> Call:
    """`liger_rms_norm`."""
    from liger_kernel.transformers.functional import liger_rms_norm

    return refusing(lambda x, weight, eps: liger_rms_norm(x, weight, eps, in_place=False), saying=TOO_WIDE)


def add_rms_norm(case: Any) -> Call:
    """`liger_fused_add_rms_norm`."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return liger_fused_add_rms_norm(x, residual, weight, eps, in_place=False)

    return refusing(call, saying=TOO_WIDE)


def layer_norm(case: Any) -> Call:
    """`liger_layer_norm`."""
    from liger_kernel.transformers.functional import liger_layer_norm

    return refusing(lambda x, weight, bias, eps: liger_layer_norm(x, weight, bias, eps), saying=TOO_WIDE)


def swiglu(case: Any) -> Call:
    """`liger_swiglu`; its backward pass overwrites gate and up, of which it gets copies."""
    from liger_kernel.transformers.functional import liger_swiglu

    return _gated(case, liger_swiglu)


def geglu(case: Any) -> Call:
    """`liger_geglu`, the tanh form; its backward pass overwrites gate and up, of which it gets copies."""
    from liger_kernel.transformers.functional import liger_geglu

    return _gated(case, liger_geglu)


def _gated(case: Any, function: Call) -> Call:
    def call(gate: Any, up: Any) -> Any:
        return function(gate, up)

    if case.pass_ in KEPT:
        return refusing(call, saying=TOO_WIDE)
    copies = forcing(sparing(call), lambda gate, up: (gate.detach().clone(), up.detach().clone()))
    return refusing(copies, saying=TOO_WIDE)


def rope(case: Any) -> Call:
    """`liger_rope`, in place on (B, S, H, D).

    Inputs in (B, H, S, D) it copies to that order itself, forward and backward, and turns the copy; where
    the two orders are the same memory (one head, one position) the copy is made here.
    """
    from liger_kernel.transformers.functional import liger_rope

    if case.options["layout"] != "half":
        raise NotImplementedError("liger_rope has the half layout only")
    D = case.axes["D"]
    same = [name for name, heads in (("q", "H"), ("k", "Hkv")) if 1 in (case.axes[heads], case.axes["S"])]

    def call(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        turned = {"q": q, "k": k}
        for name in same:
            turned[name] = turned[name].clone()
        out = liger_rope(turned["q"], turned["k"], cos, sin, rotary_dim=D)
        for x in out:
            if same and x.requires_grad:
                x.register_hook(lambda gradient: gradient.clone())
        return out

    def conversion(q: Any, k: Any, cos: Any, sin: Any, layout: str) -> Any:
        return tuple(x.detach().transpose(1, 2).contiguous() for x in (q, k))

    return forcing(call, conversion)


def softmax(case: Any) -> Call:
    """`liger_softmax`."""
    from liger_kernel.transformers.functional import liger_softmax

    return refusing(lambda x: liger_softmax(x), saying=TOO_WIDE)


def cross_entropy(case: Any) -> Call:
    """`liger_cross_entropy`; with a gradient it writes that over the logits, of which it gets a copy."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    def plain(logits: Any, target: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Any:
        return liger_cross_entropy(logits, target, lse_square_scale=z_loss, label_smoothing=label_smoothing)

    if case.pass_ in KEPT:
        return plain

    def call(logits: Any, target: Any, **options: float) -> Any:
        return plain(logits.clone(), target, **options)

    return forcing(
        sparing(call) if case.pass_ == "backward" else call,
        lambda logits, target, **options: logits.detach().clone(),
    )


def fused_linear_cross_entropy(case: Any) -> Call:
    """`liger_fused_linear_cross_entropy`: logits in chunks, both gradients made in the forward pass."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def call(x: Any, weight: Any, target: Any) -> Any:
        return liger_fused_linear_cross_entropy(x, weight, target)

    # Backward alone scales the gradients that forward left, in place: a second one would scale them again.
    return sparing(call) if case.pass_ == "backward" else call


IMPLEMENTATIONS = {
    "add_rms_norm": {"liger": add_rms_norm},
    "cross_entropy": {"liger": cross_entropy},
    "fused_linear_cross_entropy": {"liger": fused_linear_cross_entropy},
    "geglu": {"liger": geglu},
    "layer_norm": {"liger": layer_norm},
    "rms_norm": {"liger": rms_norm},
    "rope": {"liger": rope},
    "softmax": {"liger": softmax},
    "swiglu": {"liger": swiglu},
}
