"""Which of our operators a PyTorch program calls, with shapes, strides, dtypes and counts, and a plan of them.

    from kernelmark.suite.capture import Capture

    with Capture() as seen:
        model(tokens).loss.backward()
    print(seen.plan(catalog))

A mode over PyTorch's public functions sees every call that the program makes outside of compiled code; `traced`
reads the operators of a trace that PyTorch's profiler wrote. What is no operator of ours (a library's own kernels,
compiled regions) is listed with its share of the time.
"""

from __future__ import annotations

from .program import run
from .recorder import Call, Capture, Seen
from .trace import traced

__all__ = ["Call", "Capture", "Seen", "run", "traced"]
