"""Torch-TensorRT: `torch.compile` with TensorRT as its backend, of PyTorch's own implementation. Not run yet.

What TensorRT has no layer for goes back to PyTorch, as its users have it; with whole graphs alone most would fail.
"""

from __future__ import annotations

from typing import Any

from ._terms import DTYPES, Call, forward_only
from .tensorrt import GRAPHS, NO_ENVIRONMENT
from .torch import IMPLEMENTATIONS as EAGER

__all__ = ["NO_ENVIRONMENT"]
REQUIRES = ("torch-tensorrt", "tensorrt")
ENVIRONMENT = "tensorrt"
DEVICES = ("cuda",)


def running(eager: Any) -> Any:
    """A factory from PyTorch's."""

    @forward_only("Torch-TensorRT")
    def factory(case: Any) -> Call:
        """`torch.compile(backend="torch_tensorrt")`, in the case's precision alone."""
        import torch
        import torch_tensorrt  # noqa: F401  # registers the backend

        options: Any = {"enabled_precisions": {getattr(torch, DTYPES[case.dtype])}}
        compiled: Call = torch.compile(eager(case), backend="torch_tensorrt", dynamic=False, options=options)
        return compiled

    return factory


IMPLEMENTATIONS = {x: {"torch_tensorrt": running(EAGER[x]["torch"])} for x in GRAPHS}
