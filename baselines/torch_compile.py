"""torch.compile (Inductor, static shapes) of the eager implementation of each operator.

As it comes, and in the mode `max-autotune`, in which it times more tile sizes while it compiles; without that
mode's CUDA graphs, which are no part of a kernel. The second where Inductor writes the whole kernel, and for the
plain matrix product, where it times templates of its own beside cuBLAS, which can take minutes a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .torch import IMPLEMENTATIONS as EAGER

REQUIRES = ("torch",)
DEVICES = {"torch_compile_max_autotune": ("cuda",)}
APART = ("attention", "attention_mla", "attention_varlen", "attention_window")
"""PyTorch keeps plans of cuDNN's attention under a key without the output's strides (`MHAParams` in its MHA.cpp).
What is compiled leaves its output otherwise than eager: whichever came second in a process had wrong gradients,
seen on an H200 with PyTorch 2.11."""
TUNED = (
    "add_rms_norm",
    "causal_conv1d",
    "cross_entropy",
    "fp8_quant",
    "gated_rms_norm",
    "geglu",
    "gelu",
    "gradient_compression",
    "gradient_decompression",
    "layer_norm",
    "matmul",
    "mx_quant",
    "rms_norm",
    "rope",
    "selective_state_update",
    "softmax",
    "swiglu",
)


def _compiled(
    eager: Callable[[Any], Callable[..., Any]], mode: str | None = None
) -> Callable[[Any], Callable[..., Any]]:
    def factory(case: Any) -> Callable[..., Any]:
        import torch

        return torch.compile(eager(case), dynamic=False, mode=mode)

    return factory


def adamw(case: Any) -> Callable[..., Any]:
    """The update of one tensor, compiled once for each shape: a graph of hundreds takes minutes to compile."""
    import torch

    from .torch import adamw as eager

    return eager(case, torch.compile(dynamic=False))


def selective_scan(case: Any) -> Callable[..., Any]:
    """The loop over tokens, unrolled in one graph; a long one would take longer to compile than to run."""
    from .torch import selective_scan as eager

    if case.axes["S"] > 256:
        raise NotImplementedError("torch.compile unrolls the loop over tokens: at most 256 of them")
    return _compiled(eager)(case)


def moe(case: Any) -> Callable[..., Any]:
    """Of `torch_grouped_mm`: a loop over experts is compiled anew for each count of tokens, which took up to 24 s
    a case and was slower than eager.
    """
    return _compiled(EAGER["moe"]["torch_grouped_mm"])(case)


def _both(operator: str, eager: Callable[[Any], Callable[..., Any]]) -> dict[str, Any]:
    """The implementations of one operator."""
    found = {"torch_compile": _compiled(eager)}
    if operator in TUNED:
        found["torch_compile_max_autotune"] = _compiled(eager, "max-autotune-no-cudagraphs")
    return found


IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    operator: _both(operator, implementations["torch"])
    for operator, implementations in EAGER.items()
    if "torch" in implementations and operator != "memory_pool"  # whose systems are settings, not calls
} | {
    "adamw": {"torch_compile": adamw},
    "moe": {"torch_compile": moe},
    "selective_scan": {"torch_compile": selective_scan},
}
