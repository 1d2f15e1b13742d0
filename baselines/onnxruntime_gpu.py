"""ONNX Runtime on an NVIDIA GPU, by its CUDA provider: the graphs of `onnxruntime.py`. Not run on a GPU yet.

It works on a stream of its own and ends each run by waiting for it, which events on torch's stream do not see:
the provider is given torch's stream instead, and does not wait. TF32, its default for products in fp32, is off.
"""

from __future__ import annotations

from typing import Any

from . import onnxruntime
from ._terms import Call

REQUIRES = ("onnxruntime-gpu", "onnx")
ENVIRONMENT = "onnxruntime_gpu"
DEVICES = ("cuda",)


def running(operator: str) -> Any:
    """A factory for an operator. Nodes without a kernel for GPUs would run on the CPU: they are refused."""

    def factory(case: Any) -> Call:
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        options = {
            "user_compute_stream": str(stream),
            "device_id": str(torch.cuda.current_device()),
            "use_tf32": "0",
        }
        return onnxruntime.running(operator, [("CUDAExecutionProvider", options)], "cuda")(case)

    factory.__doc__ = f"`{operator}` as a graph, by the CUDA provider."
    return factory


IMPLEMENTATIONS = {x: {"onnxruntime_gpu": running(x)} for x in onnxruntime.OPERATORS if x != "int8_linear"}
