"""bitsandbytes: weights in four bits. Its paged optimizers are never used here: they take managed memory, which
can hang a GPU that others share.
"""

from __future__ import annotations

from typing import Any

from ._terms import Call

REQUIRES = ("bitsandbytes",)
INSTALL = "and would not do: its formats of four bits are its own"
DEVICES = ("cuda",)


def mx_matmul(case: Any) -> Call:
    """None of this operator's formats is its own."""
    raise NotImplementedError(
        "bitsandbytes' weights in four bits are NF4 and an FP4 of its own, with fp32 scales: not MXFP4 or NVFP4"
    )


IMPLEMENTATIONS = {"mx_matmul": {"bitsandbytes": mx_matmul}}
