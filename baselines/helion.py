"""Helion (pytorch/helion): a product written in it, tuned at the first call of a shape, for about ten minutes.

So a case's deadline ends it where it was not tuned before: Helion keeps what it found in its cache. Not run on a
GPU yet.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call

REQUIRES = ("helion", "triton")
DEVICES = ("cuda",)


def matmul(case: Any) -> Call:
    """The product of Helion's documentation, in 16 bits."""
    if case.dtype == "fp32":
        raise NotImplementedError("this product in Helion takes bf16 and fp16")
    if case.options["epilogue"] != "none":
        raise NotImplementedError("this product in Helion has no epilogue")
    from ._helion_kernels import product

    return lambda a, b, bias, gated: product(a, b)


IMPLEMENTATIONS = {"matmul": {"helion": matmul}}
