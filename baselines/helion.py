"""Helion (pytorch/helion): a product written in it, tuned at the first call of a shape, for about ten minutes.

So a case's deadline ends it where it was not tuned before: Helion keeps what it found in its cache. Not run on a
GPU yet.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call

REQUIRES = ("helion", "triton")
DEVICES = ("cuda",)


torch: Any = None
hl: Any = None
"""Set where the product is compiled: Helion looks its names up in this module."""


def product(a: Any, b: Any) -> Any:
    """a (M, K) @ b (K, N) in a's dtype, summed in fp32."""
    M, K = a.size()
    _, N = b.size()
    out = torch.empty([M, N], dtype=a.dtype, device=a.device)
    for rows, columns in hl.tile([M, N]):
        acc = hl.zeros([rows, columns], dtype=torch.float32)
        for depth in hl.tile(K):
            acc = torch.addmm(acc, a[rows, depth], b[depth, columns])  # acc += A @ B
        out[rows, columns] = acc.to(a.dtype)
    return out


def matmul(case: Any) -> Call:
    """The product of Helion's documentation, in 16 bits."""
    global torch, hl
    import helion
    import helion.language as hl
    import torch

    if case.dtype == "fp32":
        raise NotImplementedError("this product in Helion takes bf16 and fp16")
    if case.options["epilogue"] != "none":
        raise NotImplementedError("this product in Helion has no epilogue")
    compiled = helion.kernel(static_shapes=True)(product)
    return lambda a, b, bias, gated: compiled(a, b)


IMPLEMENTATIONS = {"matmul": {"helion": matmul}}
