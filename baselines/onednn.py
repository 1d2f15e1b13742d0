"""oneDNN on a CPU, called by the operators through which PyTorch's compiler calls it.

PyTorch calls it too where it sees fit: for products in bf16 and of 8-bit integers, and not for those in fp32,
which go to MKL in the builds that have that. Here the call is oneDNN's whatever the dtype. The weight of `matmul`
is given with each call, so it is not packed before.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call, forward_only

REQUIRES = ("torch",)
DEVICES = ("cpu",)


def _there() -> None:
    import torch

    if not torch.backends.mkldnn.is_available():
        raise NotImplementedError("this PyTorch is built without oneDNN")


@forward_only("oneDNN, so called,")
def matmul(case: Any) -> Call:
    """`mkldnn::_linear_pointwise`: a linear layer, which is layout "nt"; the bias in it, a gate after it."""
    import torch

    _there()
    if case.options["layout"] != "nt":
        raise NotImplementedError("oneDNN's linear layer takes a weight (N, K) only: layout nt")
    if case.dtype == "fp16":
        raise NotImplementedError("PyTorch calls oneDNN's linear layer in fp32 and bf16 only")
    if case.dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise NotImplementedError("oneDNN multiplies bf16 on CPUs with AVX-512 only; this one has none")
    linear = torch.ops.mkldnn._linear_pointwise

    def call(a: Any, b: Any, bias: Any, gated: bool) -> Any:
        y = linear(a, b.t(), bias, "none", [], "")
        if gated:
            gate, up = y.chunk(2, 1)
            return torch.nn.functional.silu(gate) * up
        return y

    return call


@forward_only("oneDNN, so called,")
def int8_linear(case: Any) -> Call:
    """`onednn::qlinear_pointwise`: the weight packed once, symmetric by output; the input rounded as a whole to 8
    bits without a sign, in PyTorch's operations, as its quantized models do. To 7 where a CPU adds up products of
    bytes in 16 bits, which 8 could overflow (`reduce_range` of PyTorch's quantizers).
    """
    import torch

    _there()
    largest = 255 if torch.cpu._is_vnni_supported() else 127
    packed: Any = None

    def prepared(layer: Any) -> tuple[Any, Any, Any]:
        weight = layer.weight
        scale = weight.abs().amax(1).clamp(min=1e-30) / 127
        q = (weight / scale[:, None]).round().char()
        return torch.ops.onednn.qlinear_prepack(q, None), scale, torch.zeros(len(scale), dtype=torch.int64)

    def call(x: Any, layer: Any) -> Any:
        nonlocal packed
        if packed is None:
            packed = prepared(layer)
        low, high = x.aminmax()
        low, high = low.clamp(max=0), high.clamp(min=0)  # 0 is one of them, and their place fits in 32 bits
        scale = ((high - low) / largest).clamp(min=1e-30)
        zero = (-low / scale).round().to(torch.int32)
        q = (x / scale + zero).round().clamp(0, largest).to(torch.uint8)
        return torch.ops.onednn.qlinear_pointwise(
            q, scale, zero, *packed, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return call


IMPLEMENTATIONS = {"int8_linear": {"onednn": int8_linear}, "matmul": {"onednn": matmul}}
