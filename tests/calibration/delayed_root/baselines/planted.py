"""PyTorch's layer norm behind a delay on the device: a truth that worth is held to.

`planted_null` is PyTorch's own under another name. On a CPU the caller itself waits, busy.
"""

from __future__ import annotations

import time
from typing import Any

REQUIRES = ("torch", "triton")
DEVICES = ("cuda", "cpu")


def _behind(us: int) -> Any:
    def made(case: Any) -> Any:
        from torch.nn import functional

        def call(x: Any, weight: Any, bias: Any, eps: float) -> Any:
            if us and x.is_cuda:
                from ._spin import spin

                spin(us)
            elif us:
                until = time.perf_counter_ns() + 1000 * us
                while time.perf_counter_ns() < until:
                    pass
            return functional.layer_norm(x, weight.shape, weight, bias, eps)

        return call

    return made


IMPLEMENTATIONS = {
    "layer_norm": {f"planted_{us}us" if us else "planted_null": _behind(us) for us in (0, 50, 200, 1000)}
}
