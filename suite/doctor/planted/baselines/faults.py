"""Implementations with a known fault each, and the honest one they are held against."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from kernelmark.suite.doctor.planted.operators.chain import LINKS

REQUIRES = ("torch",)
EXTRA = LINKS // 20
"""Five per cent more links."""


def _chain(links: int) -> Callable[..., Any]:
    def run(x: Any, w: Any) -> Any:
        for _ in range(links):
            x = x @ w
        return x

    return run


def honest(case: Any) -> Callable[..., Any]:
    """The right answer at its true price."""
    return _chain(LINKS)


def slower(case: Any) -> Callable[..., Any]:
    """The right answer, and 5 % more work whose result is thrown away."""
    true, extra = _chain(LINKS), _chain(EXTRA)

    def run(x: Any, w: Any) -> Any:
        extra(x, w)
        return true(x, w)

    return run


def stale(case: Any) -> Callable[..., Any]:
    """The answer of the first call, whatever it is asked afterwards."""
    true = _chain(LINKS)
    kept: list[Any] = []

    def run(x: Any, w: Any) -> Any:
        if not kept:
            kept.append(true(x, w))
        return kept[0].clone()

    return run


def nan(case: Any) -> Callable[..., Any]:
    """One element in a million is NaN."""
    true = _chain(LINKS)

    def run(x: Any, w: Any) -> Any:
        y = true(x, w)
        y.view(-1)[-1] = float("nan")
        return y

    return run


def hang(case: Any) -> Callable[..., Any]:
    """Never comes back."""

    def run(x: Any, w: Any) -> Any:
        while True:
            time.sleep(1)

    return run


def kill(case: Any) -> Callable[..., Any]:
    """Takes its process with it."""

    def run(x: Any, w: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    return run


def hoard(case: Any) -> Callable[..., Any]:
    """Asks for more memory than there is."""

    def run(x: Any, w: Any) -> Any:
        import torch

        return torch.empty(1 << 48, dtype=torch.uint8, device=x.device)

    return run


def corrupt(case: Any) -> Callable[..., Any]:
    """Reads out of bounds on the device, after which its CUDA context is of no more use."""

    def run(x: Any, w: Any) -> Any:
        import torch

        if x.device.type != "cuda":
            raise NotImplementedError("only a GPU has a context to corrupt")
        y = x.view(-1)[torch.full((1,), 1 << 40, device=x.device)]
        torch.cuda.synchronize()
        return y

    return run


def squares(case: Any) -> Callable[..., Any]:
    """Reads its input once: as quick as where the input lies."""
    return lambda x: x.square().sum(-1)


IMPLEMENTATIONS = {
    "chain": {
        "honest": honest,
        "slower": slower,
        "stale": stale,
        "nan": nan,
        "hang": hang,
        "kill": kill,
        "hoard": hoard,
        "corrupt": corrupt,
    },
    "reread": {"squares": squares},
}
