"""FlashAttention 4 (`flash-attn-4`): attention in CuTe DSL, forward and backward.

It takes (B, S, H, D) with any strides but the last: our (B, H, S, D) is a view of that, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

from . import _blocks
from ._terms import Call, refusing

REQUIRES = ("flash-attn-4", "nvidia-cutlass-dsl")
DEVICES = ("cuda",)


def attention(case: Any) -> Call:
    """`flash_attn.cute.flash_attn_func`, which returns the output and, where asked for, the log-sum-exp; its
    `learnable_sink` for sinks, its `softcap` for a cap of scores.
    """
    from flash_attn.cute import flash_attn_func

    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("FlashAttention 4 takes fp16 and bf16 only")
    causal = case.options["mask"] == "causal"
    window_size = _blocks.reach(case) if "W" in case.axes else (None, None)

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0, sinks: Any = None, cap: float = 0.0) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        more = {} if sinks is None else {"learnable_sink": sinks}
        if cap:
            more["softcap"] = cap
        out, _ = flash_attn_func(q, k, v, causal=causal, window_size=window_size, **more)
        return out.transpose(1, 2)

    return refusing(call, AssertionError, ValueError)


def attention_varlen(case: Any) -> Call:
    """`flash_attn.cute.flash_attn_varlen_func`, whose interface ours is; its `learnable_sink` for sinks, its
    `softcap` for a cap of scores.
    """
    from flash_attn.cute import flash_attn_varlen_func

    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("FlashAttention 4 takes fp16 and bf16 only")
    causal = case.options["mask"] == "causal"
    fixed: dict[str, Any] = {"window_size": _blocks.reach(case)} if case.axes["W"] else {}

    def call(mask: str, window: int = 0, sinks: Any = None, cap: float = 0.0, **inputs: Any) -> Any:
        more = dict(fixed) if sinks is None else fixed | {"learnable_sink": sinks}
        if cap:
            more["softcap"] = cap
        return flash_attn_varlen_func(**inputs, causal=causal, **more)[0]

    return refusing(call, AssertionError, ValueError)


IMPLEMENTATIONS = {
    "attention": {"flash_attn_4": attention},
    "attention_mla": {"flash_attn_4": attention},
    "attention_window": {"flash_attn_4": attention},
    "attention_varlen": {"flash_attn_4": attention_varlen},
}
