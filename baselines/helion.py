"""Helion (pytorch/helion): kernels written in it (`_helion_kernels.py`), tuned at the first call of a shape for up
to ten minutes.

Its package ships a compiler and no kernels: its examples stand in its repository. So it is measured on request, as
plan `languages` does. On an H200 three products ran and were right (`20261124-183154-fee7`). Its norms, softmax,
SwiGLU, cross-entropy and attention were not run on a GPU yet; answers were checked by its interpreter.
"""

from __future__ import annotations

from typing import Any

from . import _blocks, _helion_kernels
from ._terms import Call, forcing, forward_only

REQUIRES = ("helion", "triton")
ENVIRONMENT = "helion"
DEVICES = ("cuda",)
ON_REQUEST = ("helion",)


@forward_only("this product in Helion")
def matmul(case: Any) -> Call:
    """The product of Helion's documentation, in 16 bits."""
    if case.dtype == "fp32":
        raise NotImplementedError("this product in Helion takes bf16 and fp16")
    if case.options["epilogue"] != "none":
        raise NotImplementedError("this product in Helion has no epilogue")
    product = _helion_kernels.searched(_helion_kernels.product)
    return lambda a, b, bias, gated: product(a, b)


@forward_only("this kernel in Helion")
def rms_norm(case: Any) -> Call:
    """A row at once, in fp32."""
    function = _helion_kernels.searched(_helion_kernels.rms_norm)
    return lambda x, weight, eps: function(x.view(-1, x.shape[-1]), weight, eps).view(x.shape)


@forward_only("this kernel in Helion")
def layer_norm(case: Any) -> Call:
    """A row at once, in fp32."""
    function = _helion_kernels.searched(_helion_kernels.layer_norm)
    return lambda x, weight, bias, eps: function(x.view(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


@forward_only("this kernel in Helion")
def softmax(case: Any) -> Call:
    """A row at once, in fp32."""
    function = _helion_kernels.searched(_helion_kernels.softmax)
    return lambda x: function(x)


@forward_only("this kernel in Helion")
def swiglu(case: Any) -> Call:
    """Element by element, in fp32."""
    function = _helion_kernels.searched(_helion_kernels.swiglu)
    return lambda gate, up: function(gate, up)


@forward_only("this kernel in Helion")
def cross_entropy(case: Any) -> Call:
    """Losses of rows by Helion, their mean by PyTorch."""
    if case.options["regularized"]:
        raise NotImplementedError("this kernel in Helion has neither label smoothing nor a z-loss")
    losses = _helion_kernels.searched(_helion_kernels.losses)
    return lambda logits, target: losses(logits, target).mean()


@forward_only("this attention in Helion")
def attention(case: Any) -> Call:
    """Attention with running maximum and sum (Dao et al., arXiv 2205.14135), a head at a time."""
    if case.dtype == "fp32":
        raise NotImplementedError("this attention in Helion takes bf16 and fp16")
    _blocks.takes(case, "this attention in Helion")
    function = _helion_kernels.searched(_helion_kernels.attention)
    causal = case.options["mask"] == "causal"

    def heads(q: Any, k: Any, v: Any, mask: str) -> Any:
        return [x.flatten(0, 1) for x in (q, k, v)]

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        return function(*heads(q, k, v, mask), causal).view(q.shape)

    return call if case.options.get("storage", "bhsd") == "bhsd" else forcing(call, heads)


IMPLEMENTATIONS = {
    "attention": {"helion": attention},
    "cross_entropy": {"helion": cross_entropy},
    "layer_norm": {"helion": layer_norm},
    "matmul": {"helion": matmul},
    "rms_norm": {"helion": rms_norm},
    "softmax": {"helion": softmax},
    "swiglu": {"helion": swiglu},
}
