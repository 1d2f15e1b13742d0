"""Programmatic dependent launches (CUDA C++ programming guide): a kernel begins while the one before it ends.

A step of decoding is kernels of some microseconds, each of which reads what the one before it wrote. Between two
of them memory has nothing to do for as long as the last programs of one finish and the first of the next start,
ask and wait. Launched so, a kernel's programs start as soon as all of those before run, and may ask for what they
will read, but must not read before `wait_for_previous`. What they ask for comes to L2, where others' writes would
reach it too, so that a weight which was just written is read as it is.

All of a kernel before it is done where `wait_for_previous` returns, and so is all before that one, if it called
`wait_for_previous` as well or was launched as usual. Where nothing is launched so it waits for nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._common import capability

DEPENDENT = False
"""Whether kernels of a decoding step are launched so. Not run on a GPU yet."""
LINE = 128
"""Bytes of a line of L2."""


def dependent(device: torch.device) -> bool:
    """Whether kernels on a device are launched so: NVIDIA's GPUs from Hopper on. One that is calls
    `wait_for_previous`.
    """
    return DEPENDENT and capability(device) >= (9, 0)


def launched(dependent: bool) -> dict[str, bool]:
    """What Triton's launch of a kernel takes for that."""
    return {"launch_pdl": True} if dependent else {}


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Has the lines at these addresses come to L2, and goes on."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous():  # type: ignore[no-untyped-def]  # as above
    """Waits for the kernels before this one, then lets the one behind it start."""
    gdc_wait()
    gdc_launch_dependents()
