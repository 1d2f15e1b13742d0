"""A private softmax for a GPU: a row a program, in Triton. Its name is the operator's, and that is all it takes.

`KERNELMARK_PATH=examples/private_kernel kernelmark run --operator softmax` measures it beside ours, under the name
of this folder, `private_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def softmax(x: torch.Tensor) -> torch.Tensor:
    """x (M, D) to its softmax over the last dimension, in x's dtype; computed in fp32."""
    y = torch.empty_like(x)
    M, D = x.shape
    _softmax[(M,)](x, y, D, x.stride(0), BLOCK=triton.next_power_of_2(D))
    return y


@triton.jit
def _softmax(x, y, D, stride, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + column, column < D, float("-inf")).to(tl.float32)
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * D + column, (value / tl.sum(value, 0)).to(y.dtype.element_ty), column < D)
