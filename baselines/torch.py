"""PyTorch, eager: its own fused operator where it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REQUIRES = ("torch",)


def rms_norm(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.rms_norm`."""
    from torch.nn import functional

    return lambda x, weight, eps: functional.rms_norm(x, weight.shape, weight, eps)


def attention(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.scaled_dot_product_attention`, which chooses its backend itself."""
    from torch.nn.functional import scaled_dot_product_attention

    groups = case.axes["H"] != case.axes["Hkv"]
    causal = case.options["mask"] == "causal"

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups)

    return call


def layer_norm(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.layer_norm`."""
    from torch.nn import functional

    return lambda x, weight, bias, eps: functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_rms_norm(case: Any) -> Callable[..., Any]:
    """An addition and `torch.nn.functional.rms_norm`."""
    from torch.nn import functional

    def call(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        h = x + residual
        return functional.rms_norm(h, weight.shape, weight, eps), h

    return call


def gelu(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.gelu`."""
    from torch.nn import functional

    return lambda x, approximate: functional.gelu(x, approximate=approximate)


def swiglu(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.silu` and a multiplication."""
    from torch.nn import functional

    return lambda gate, up: functional.silu(gate) * up


def geglu(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.gelu` and a multiplication."""
    from torch.nn import functional

    return lambda gate, up: functional.gelu(gate, approximate="tanh") * up


def rope(case: Any) -> Callable[..., Any]:
    """Elementwise operations: PyTorch has no operator for it."""
    import torch

    def half(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def interleaved(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    turn = half if case.options["layout"] == "half" else interleaved
    return lambda q, k, cos, sin, layout: (turn(q, cos, sin), turn(k, cos, sin))


def cross_entropy(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.cross_entropy`."""
    from torch.nn import functional

    return lambda logits, target: functional.cross_entropy(logits, target)


def fp8_quant(case: Any) -> Callable[..., Any]:
    """Maximum, division and conversion: PyTorch has no operator for it."""
    import torch

    dtype = torch.float8_e4m3fn if case.options["format"] == "e4m3" else torch.float8_e5m2
    largest = torch.finfo(dtype).max

    def row(x: Any, granularity: str, format: str) -> Any:
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
        return (wide / scale).to(dtype), scale

    def block(x: Any, granularity: str, format: str) -> Any:
        M, N = x.shape
        q, scale = row(torch.nn.functional.pad(x, (0, -N % 128)).view(M, -1, 128), granularity, format)
        return q.view(M, -1)[:, :N], scale.squeeze(-1)

    return row if case.options["granularity"] == "row" else block


IMPLEMENTATIONS = {
    "add_rms_norm": {"torch": add_rms_norm},
    "attention": {"torch": attention},
    "cross_entropy": {"torch": cross_entropy},
    "fp8_quant": {"torch": fp8_quant},
    "geglu": {"torch": geglu},
    "gelu": {"torch": gelu},
    "layer_norm": {"torch": layer_norm},
    "rms_norm": {"torch": rms_norm},
    "rope": {"torch": rope},
    "swiglu": {"torch": swiglu},
}
