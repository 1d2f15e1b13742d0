"""ring-flash-attention's zigzag ring over FlashAttention 2 (github.com/zhuzilin/ring-flash-attention).

Its ranks hold chunks r and 2·P - 1 - r as ours do; K and V go round with sends and receives, and outputs are
merged by their log-sum-exp. Not run yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REQUIRES = ("ring-flash-attn", "flash-attn")
ENVIRONMENT = "ring_flash_attn"
DEVICES = ("cuda",)
NO_ENVIRONMENT = (
    "ring-flash-attn calls FlashAttention 2, which has no wheel for this torch and is compiled as it is "
    "installed: install both with kernelmark in .venv-ring_flash_attn by hand"
)


def zigzag(case: Any) -> Callable[..., Any]:
    """Tensors are (B, S, H, D) there."""
    from ring_flash_attn import zigzag_ring_flash_attn_func

    if case.options["mask"] != "causal":
        raise NotImplementedError("its zigzag ring is causal")
    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError(f"FlashAttention 2 has no {case.dtype}")

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return zigzag_ring_flash_attn_func(q, k, v, causal=True).transpose(1, 2)

    return call


IMPLEMENTATIONS = {"attention_context_parallel": {"ring_flash_attn_zigzag": zigzag}}
