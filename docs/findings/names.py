"""Triton's Gluon renames between releases, and its Python lacks what its builder has.

Tiles are copied by `async_copy_global_to_shared` until Triton 3.8 and by `async_load` from 3.9 on; threads of a
warp group meet at `thread_barrier` until 3.6 and at `barrier` since. The copy engine's addition to memory
(`cp.reduce.async.bulk.tensor`), which a fused backward pass of attention needs for dQ, is a method of the
builder, `create_async_tma_reduce`, with no function in Python: a `@builtin` of a few lines calls it.
"""

from __future__ import annotations

import triton
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def show() -> bool:
    """Prints what this Triton has; whether the builder's addition lacks a function in Python."""
    copies = [x for x in ("async_copy_global_to_shared", "async_load") if hasattr(tma, x)]
    barriers = [x for x in ("thread_barrier", "barrier") if hasattr(gl, x)]
    builder = hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce") and hasattr(ir, "DESCRIPTOR_REDUCE_KIND")
    python = any("reduce" in x for x in dir(tma))
    print(
        f"Triton {triton.__version__}: tiles by {' and '.join(copies)}; threads meet at {' and '.join(barriers)}"
    )
    print(f"addition by the copy engine: in the builder {builder}, in Python {python}")
    return bool(copies and barriers) and builder and not python


if __name__ == "__main__":
    show()
