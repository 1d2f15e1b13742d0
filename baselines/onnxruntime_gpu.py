"""ONNX Runtime on an NVIDIA GPU, by its CUDA provider: the graphs of `onnxruntime.py`.

It works on a stream of its own and ends each run by waiting for it, which events on torch's stream do not see.
Here it is told not to wait, and its stream is joined to torch's before and after each call. (It cannot be given
torch's default stream, whose handle it takes for none.) TF32, its default for products in fp32, is off.

Its Sigmoid rounds each of its steps to 16 bits, so that rows of `swiglu` were `incorrect` on an H200.
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

        own = torch.cuda.Stream()
        options = {
            "user_compute_stream": str(own.cuda_stream),
            "device_id": str(torch.cuda.current_device()),
            "use_tf32": "0",
        }
        run = onnxruntime.running(operator, [("CUDAExecutionProvider", options)], "cuda")(case)

        def call(**inputs: Any) -> Any:
            here = torch.cuda.current_stream()
            own.wait_stream(here)
            answer = run(**inputs)
            here.wait_stream(own)
            return answer

        return call

    factory.__doc__ = f"`{operator}` as a graph, by the CUDA provider."
    return factory


IMPLEMENTATIONS = {x: {"onnxruntime_gpu": running(x)} for x in onnxruntime.OPERATORS if x != "int8_linear"}
