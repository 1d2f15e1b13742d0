"""ONNX Runtime on an NVIDIA GPU, by its CUDA provider: the graphs of `onnxruntime.py`.

It works on a stream of its own and ends each run by waiting for it, which events on torch's stream do not see.
Here it is told not to wait, and its stream is joined to torch's before and after each call. (It cannot be given
torch's default stream, whose handle it takes for none.) TF32, its default for products in fp32, is off.

Its Sigmoid rounds each of its steps to 16 bits, so that rows of `swiglu` were `incorrect` on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import onnxruntime
from ._terms import Call

REQUIRES = ("onnxruntime-gpu", "onnx")
ENVIRONMENT = "onnxruntime_gpu"
DEVICES = ("cuda",)


def _joined(make: Callable[[list[Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """What is made of the CUDA provider, on a stream of its own that is joined to torch's."""
    import torch

    own = torch.cuda.Stream()
    options = {
        "user_compute_stream": str(own.cuda_stream),
        "device_id": str(torch.cuda.current_device()),
        "use_tf32": "0",
    }
    run = make([("CUDAExecutionProvider", options)])

    def call(*inputs: Any, **named: Any) -> Any:
        here = torch.cuda.current_stream()
        own.wait_stream(here)
        answer = run(*inputs, **named)
        here.wait_stream(own)
        return answer

    return call


def running(operator: str) -> Any:
    """A factory for an operator. Nodes without a kernel for GPUs would run on the CPU: they are refused."""

    def factory(case: Any) -> Call:
        return _joined(lambda providers: onnxruntime.running(operator, providers, "cuda")(case))

    factory.__doc__ = f"`{operator}` as a graph, by the CUDA provider."
    return factory


class _Passes:
    """A whole model by the CUDA provider."""

    def load(self, *given: Any) -> None:
        """Exports the model and opens it."""

        def make(providers: list[Any]) -> Callable[..., Any]:
            passes = onnxruntime.modelled(providers, "cuda")
            passes.load(*given)
            return passes

        self._call = _joined(make)

    def __call__(self, tokens: Any) -> Any:
        """Logits (B, S, V)."""
        return self._call(tokens)


def forward(case: Any) -> _Passes:
    """Transformers' model of its own class, as PyTorch exports it. Not run on a GPU yet."""
    return _Passes()


IMPLEMENTATIONS: dict[str, dict[str, Callable[[Any], Any]]] = {
    **{x: {"onnxruntime_gpu": running(x)} for x in onnxruntime.OPERATORS if x != "int8_linear"},
    "forward": {"onnxruntime_gpu_model": forward},
}
