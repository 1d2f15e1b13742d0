"""PyTorch's layer norm behind a delay on the device: a truth that worth is held to.

`planted_null` is PyTorch's own under another name. On a CPU nothing is delayed.
"""

from __future__ import annotations

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
            return functional.layer_norm(x, weight.shape, weight, bias, eps)

        return call

    return made


IMPLEMENTATIONS = {
    "layer_norm": {f"planted_{us}us" if us else "planted_null": _behind(us) for us in (0, 50, 200, 1000)}
}
