"""TensorRT-LLM's operators for Hopper, as its PyTorch backend calls them. Not run yet."""

from __future__ import annotations

from typing import Any

from ._products import without_padding
from ._terms import Call, forward_only

REQUIRES = ("tensorrt-llm",)
ENVIRONMENT = "tensorrt_llm"
DEVICES = ("cuda",)
NO_ENVIRONMENT = (
    "TensorRT-LLM cannot be locked: what PyPI has is a stub that fetches the wheel from NVIDIA's own index while "
    "it is installed, and it pins another torch; install it with kernelmark in .venv-tensorrt_llm by hand"
)


@forward_only("TensorRT-LLM")
def fp8_quant(case: Any) -> Call:
    """`trtllm::fp8_quantize_1x128`: activations in blocks of 128 columns, the scales column by column."""
    import tensorrt_llm  # noqa: F401  # registers the operators
    import torch

    if case.options["granularity"] != "block" or case.options["format"] != "e4m3" or case.dtype != "bf16":
        raise NotImplementedError("TensorRT-LLM quantizes bf16 to E4M3 in blocks of 128 columns only")
    M, N = case.axes["M"], case.axes["N"]

    def call(x: Any, granularity: str, format: str) -> Any:
        q, scales = torch.ops.trtllm.fp8_quantize_1x128(x)
        # One row of scales a block of columns, rows padded to four numbers.
        return q, scales.view(-(-N // 128), -1)[:, :M].t()

    return call


@forward_only("TensorRT-LLM")
def fp8_matmul(case: Any) -> Call:
    """`trtllm::fp8_block_scaling_gemm`, with a's scales column by column as it lays them."""
    import tensorrt_llm  # noqa: F401  # registers the operators
    import torch

    if case.options["recipe"] != "block":
        raise NotImplementedError("TensorRT-LLM's product has scales of blocks only")

    dense = without_padding()

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any, recipe: str) -> Any:
        scales = scale_a.t().contiguous(), dense(scale_b=scale_b).t()
        return torch.ops.trtllm.fp8_block_scaling_gemm(a, b.t(), *scales)

    return call


IMPLEMENTATIONS = {"fp8_matmul": {"tensorrt_llm": fp8_matmul}, "fp8_quant": {"tensorrt_llm": fp8_quant}}
