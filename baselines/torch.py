"""PyTorch, eager: its own fused operator where it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REQUIRES = ("torch",)


def rms_norm(case: Any) -> Callable[..., Any]:
    """`torch.nn.functional.rms_norm`."""
    from torch.nn import functional

    return lambda x, weight, eps: functional.rms_norm(x, weight.shape, weight, eps)


IMPLEMENTATIONS = {
    "rms_norm": {"torch": rms_norm},
}
