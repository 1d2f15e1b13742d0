"""A kernel that does nothing for so many microseconds of the device's own timer."""

from __future__ import annotations

import triton
from triton.language.extra.cuda import globaltimer


@triton.jit
def _wait(ns):  # type: ignore[no-untyped-def]  # Triton's types are its own
    start = globaltimer()
    now = start
    while now - start < ns:
        now = globaltimer()


def spin(us: int) -> None:
    """Queues the delay on the current stream."""
    _wait[(1,)](us * 1000, num_warps=1)
