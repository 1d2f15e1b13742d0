"""xFormers: memory-efficient attention by whatever backend it chooses, and its Triton norms.

It lives apart from FlashAttention 4, whose package of the same import name it takes for FlashAttention 2 and
cannot load. Without that it dispatches to PyTorch's FlashAttention 2, and to its own CUTLASS kernels where
its extension fits the CUDA version. It takes (B, S, H, D) with any strides but the last: our (B, H, S, D) is a
view of that, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call, forcing, forward_only, refusing

REQUIRES = ("xformers",)
ENVIRONMENT = "xformers"
DEVICES = ("cuda",)

norms = forward_only("xFormers")


@norms
def rms_norm(case: Any) -> Call:
    """`xformers.ops.rmsnorm.rms_norm`."""
    from xformers.ops.rmsnorm import rms_norm as function

    return refusing(lambda x, weight, eps: function(x, weight, eps), AssertionError, ValueError)


@norms
def add_rms_norm(case: Any) -> Call:
    """`xformers.ops.rmsnorm.rms_norm_add`, which writes the sum over x: it gets a copy."""
    from xformers.ops.rmsnorm import rms_norm_add

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        h = x.clone()
        return rms_norm_add(h, residual, weight, eps), h

    return refusing(forcing(call, lambda x, residual, weight, eps: x.clone()), AssertionError, ValueError)


def attention(case: Any) -> Call:
    """`xformers.ops.memory_efficient_attention`; grouped heads as its fifth dimension, a view."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    H, Hkv = case.axes["H"], case.axes["Hkv"]
    bias = LowerTriangularMask() if case.options["mask"] == "causal" else None

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if Hkv == H:
            return memory_efficient_attention(q, k, v, attn_bias=bias).transpose(1, 2)
        q = q.unflatten(2, (Hkv, H // Hkv))
        k, v = (x.unsqueeze(3).expand(q.shape) for x in (k, v))
        return memory_efficient_attention(q, k, v, attn_bias=bias).flatten(2, 3).transpose(1, 2)

    # NotImplementedError is what it raises itself where no backend takes the case, with all their reasons.
    return call


IMPLEMENTATIONS = {
    "add_rms_norm": {"xformers": add_rms_norm},
    "attention": {"xformers": attention},
    "rms_norm": {"xformers": rms_norm},
}
