"""What the last of several ranks may do wrong, one fault each, and the honest one they are held against."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from kernelmark.suite.doctor.planted_ranks.operators.shared_chain import LINKS

REQUIRES = ("torch",)
EXTRA = LINKS // 20
"""Five per cent more links."""


def _last() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == dist.get_world_size() - 1


def _summed(x: Any) -> Any:
    """This rank's rows of the sum over ranks."""
    import torch.distributed as dist

    own = x.new_empty(x.shape[0] // dist.get_world_size(), x.shape[1])
    dist.reduce_scatter_tensor(own, x)
    return own


def _chain(own: Any, w: Any, links: int) -> Any:
    for _ in range(links):
        own = own @ w[0]
    return own


def honest(case: Any) -> Callable[..., Any]:
    """The right answer at its true price."""
    return lambda x, w: _chain(_summed(x), w, LINKS)


def straggler(case: Any) -> Callable[..., Any]:
    """The right answer, for which the last rank takes 5 % longer."""

    def run(x: Any, w: Any) -> Any:
        own = _summed(x)
        if _last():
            _chain(own, w, EXTRA)
        return _chain(own, w, LINKS)

    return run


def skipped_chunk(case: Any) -> Callable[..., Any]:
    """The last rank leaves its last rows as they were."""

    def run(x: Any, w: Any) -> Any:
        own = _summed(x)
        done = _chain(own, w, LINKS)
        if _last():
            done[-(len(done) // 8) :] = own[-(len(done) // 8) :]
        return done

    return run


def stale_flag(case: Any) -> Callable[..., Any]:
    """The last rank does not wait for the others' data: it takes what came for the call before."""
    before: list[Any] = []

    def run(x: Any, w: Any) -> Any:
        arrived = _summed(x)
        taken = before[0] if before and _last() else arrived
        before[:] = [arrived]
        return _chain(taken, w, LINKS)

    return run


def hang(case: Any) -> Callable[..., Any]:
    """The last rank never comes, while the others wait for it."""

    def run(x: Any, w: Any) -> Any:
        while _last():
            time.sleep(1)
        return _chain(_summed(x), w, LINKS)

    return run


def kill(case: Any) -> Callable[..., Any]:
    """The last rank's process ends, while the others wait for it."""

    def run(x: Any, w: Any) -> Any:
        if _last():
            os.kill(os.getpid(), signal.SIGKILL)
        return _chain(_summed(x), w, LINKS)

    return run


IMPLEMENTATIONS = {
    "shared_chain": {
        "honest": honest,
        "straggler": straggler,
        "skipped_chunk": skipped_chunk,
        "stale_flag": stale_flag,
        "hang": hang,
        "kill": kill,
    }
}
