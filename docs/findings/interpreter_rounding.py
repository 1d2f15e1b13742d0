"""Triton's interpreter rounds to 8-bit floats otherwise than the hardware: it loses the carry of a rounded
mantissa.

A number that rounds up to the next power of two comes out at the bottom of its own binade. Tests of kernels
that write E4M3 in the interpreter need the conversion replaced (`tests/kernels/conftest.py` does), or they fail
for right kernels.
"""

from __future__ import annotations

import numpy as np
import torch
from triton.language import float8e4nv, float32
from triton.runtime import interpreter


def show() -> bool:
    """Prints the effect; whether this Triton has it."""
    from triton._C.libtriton import ir

    values = np.array([1.0, 1.9, 1.97, 15.9, 31.5], dtype=np.float32)
    bits = interpreter._convert_float(values, float32, float8e4nv, ir.ROUNDING_MODE.RTNE)
    triton = torch.from_numpy(np.asarray(bits).astype(np.uint8)).view(torch.float8_e4m3fn).float()
    right = torch.from_numpy(values).to(torch.float8_e4m3fn).float()
    print("fp32 to E4M3:", values.tolist())
    print("  interpreter:", triton.tolist())
    print("      PyTorch:", right.tolist())
    return not torch.equal(triton, right)


if __name__ == "__main__":
    show()
