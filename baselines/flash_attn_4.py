"""FlashAttention 4 (`flash-attn-4`): attention in CuTe DSL, forward and backward.

It takes (B, S, H, D) with any strides but the last: our (B, H, S, D) is a view of that, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call, refusing

REQUIRES = ("flash-attn-4", "nvidia-cutlass-dsl")
DEVICES = ("cuda",)


def attention(case: Any) -> Call:
    """`flash_attn.cute.flash_attn_func`, which returns the output and, where asked for, the log-sum-exp."""
    from flash_attn.cute import flash_attn_func

    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("FlashAttention 4 takes fp16 and bf16 only")
    causal = case.options["mask"] == "causal"

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        out, _ = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
        return out.transpose(1, 2)

    return refusing(call, AssertionError, ValueError)


IMPLEMENTATIONS = {"attention": {"flash_attn_4": attention}}
