"""xFormers: memory-efficient attention by whatever backend it chooses, and its Triton norms.

It lives apart from FlashAttention 4, whose package of the same import name it takes for FlashAttention 2 and
cannot load. Without that it dispatches to PyTorch's FlashAttention 2, and to its own CUTLASS kernels where
its extension fits the CUDA version. It takes (B, S, H, D) with any strides but the last: our (B, H, S, D) is a
view of that, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

from . import _blocks
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
    """`xformers.ops.memory_efficient_attention`; grouped heads as its fifth dimension, a view.

    A window is its `LocalAttentionFromBottomRightMask`.
    """
    from xformers.ops import LowerTriangularMask, memory_efficient_attention
    from xformers.ops.fmha.attn_bias import LocalAttentionFromBottomRightMask, LowerTriangularFromBottomRightMask

    _blocks.takes(case, "memory_efficient_attention", "Sk")
    H, Hkv = case.axes["H"], case.axes["Hkv"]
    bias: Any = LowerTriangularMask() if case.options["mask"] == "causal" else None
    if bias is not None and _blocks.keys(case) != case.axes["S"]:
        bias = LowerTriangularFromBottomRightMask()
    if "W" in case.axes:
        left, right = _blocks.reach(case)
        bias = LocalAttentionFromBottomRightMask(window_left=left, window_right=right)

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if Hkv == H:
            return memory_efficient_attention(q, k, v, attn_bias=bias).transpose(1, 2)
        q = q.unflatten(2, (Hkv, H // Hkv))
        k, v = (x.unsqueeze(3).expand(*x.shape[:3], H // Hkv, x.shape[3]) for x in (k, v))
        return memory_efficient_attention(q, k, v, attn_bias=bias).flatten(2, 3).transpose(1, 2)

    # NotImplementedError is what it raises itself where no backend takes the case, with all their reasons.
    return call


def attention_varlen(case: Any) -> Call:
    """`xformers.ops.memory_efficient_attention` on one long sequence with a `BlockDiagonalMask`.

    The mask is made once, from lengths on the host, as its documentation has it made once a batch for all layers.
    """
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    _blocks.takes(case, "memory_efficient_attention", "Sk")
    if case.axes["W"]:
        raise NotImplementedError("of packed sequences its windows are for as many keys as queries only")
    H, Hkv = case.axes["H"], case.axes["Hkv"]
    other = case.options["keys"] != "same"
    bias: Any = None

    def call(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, mask: str, **rest: Any) -> Any:
        nonlocal bias
        if bias is None:
            lengths = (x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k))
            bias = BlockDiagonalMask.from_seqlens(*lengths, device=q.device)
            if mask == "causal":
                bias = bias.make_causal_from_bottomright() if other else bias.make_causal()
        q, k, v = (x[None] for x in (q, k, v))
        if Hkv == H:
            return memory_efficient_attention(q, k, v, attn_bias=bias)[0]
        q = q.unflatten(2, (Hkv, H // Hkv))
        k, v = (x.unsqueeze(3).expand(*x.shape[:3], H // Hkv, x.shape[3]) for x in (k, v))
        return memory_efficient_attention(q, k, v, attn_bias=bias).flatten(2, 3)[0]

    return call


IMPLEMENTATIONS = {
    "add_rms_norm": {"xformers": add_rms_norm},
    "attention": {"xformers": attention},
    "attention_window": {"xformers": attention},
    "attention_varlen": {"xformers": attention_varlen},
    "rms_norm": {"xformers": rms_norm},
}
