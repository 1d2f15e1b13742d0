"""Implementations that are dishonest, a way each: quick where they are timed, right where they are checked.

Each knows the right answer and how to hide that it does not compute it, or alters what the others in its process
rely on. `OUTCOMES` says how the harness must end each.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from .faults import honest

REQUIRES = ("torch",)
Call = Callable[..., Any]


def _remembering(key: Callable[..., object]) -> Callable[[Any], Call]:
    """Computes only for what it has not seen yet, as far as `key` tells."""

    def of(case: Any) -> Call:
        true = honest(case)
        known: dict[object, Any] = {}

        def run(x: Any, w: Any) -> Any:
            found = key(x, w)
            if found not in known:
                known[found] = true(x, w)
            return known[found]

        return run

    return of


by_pointer = _remembering(lambda x, w: (x.data_ptr(), w.data_ptr()))
by_version = _remembering(lambda x, w: (x.data_ptr(), x._version, w.data_ptr(), w._version))
by_ends = _remembering(lambda x, w: (x.data_ptr(), *(float(y.view(-1)[i]) for y in (x, w) for i in (0, -1))))


def lazy(case: Any) -> Call:
    """Gives a tensor that computes itself when somebody looks at it."""
    import torch

    true = honest(case)

    class Later(torch.Tensor):
        given: Any

        @classmethod
        def __torch_function__(cls, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            plain = [x.now() if type(x) is cls else x for x in given]
            return call(*plain, **(named or {}))

        def now(self) -> Any:
            return true(*self.given)

    def run(x: Any, w: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out: Any = torch.empty_like(x).as_subclass(Later)
        out.given = (x.clone(), w.clone())
        return out

    return run


def joined(case: Any) -> Call:
    """Gives a tensor that a thread fills, which is waited for when somebody looks at the tensor."""
    import torch

    true = honest(case)

    class Later(torch.Tensor):
        thread: threading.Thread

        @classmethod
        def __torch_function__(cls, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            for x in given:
                if type(x) is cls:
                    x.thread.join()
            with torch._C.DisableTorchFunctionSubclass():
                return call(*given, **(named or {}))

    def run(x: Any, w: Any) -> Any:
        place = torch.empty_like(x)
        thread = threading.Thread(target=lambda: place.copy_(true(x, w)))
        thread.start()
        with torch._C.DisableTorchFunctionSubclass():
            out: Any = place.as_subclass(Later)
        out.thread = thread
        return out

    return run


def on_a_thread(case: Any) -> Call:
    """Gives a plain tensor that a thread fills a little later."""
    import torch

    true = honest(case)

    def run(x: Any, w: Any) -> Any:
        place = torch.empty_like(x)
        x, w = x.clone(), w.clone()
        thread = threading.Thread(target=lambda: place.copy_(true(x, w)))
        thread.start()
        if _called_from("verify"):
            thread.join()
        return place

    return run


def on_a_stream(case: Any) -> Call:
    """Computes on a stream of its own, which nobody waits for."""
    import torch

    true = honest(case)

    def run(x: Any, w: Any) -> Any:
        if x.device.type != "cuda":
            raise NotImplementedError("only a GPU has streams")
        place = torch.empty_like(x)
        here, there = torch.cuda.current_stream(), torch.cuda.Stream()
        there.wait_stream(here)
        with torch.cuda.stream(there):
            place.copy_(true(x, w))
        return place

    return run


def _called_from(name: str) -> bool:
    frame = sys._getframe()
    while frame is not None:
        if name in frame.f_code.co_name:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return False


def looks(case: Any) -> Call:
    """Computes where its callers are called `verify`, and does nothing elsewhere."""
    import torch

    true = honest(case)
    return lambda x, w: true(x, w) if _called_from("verify") else torch.empty_like(x)


def counts(case: Any) -> Call:
    """Computes in its first calls, where it is checked, and gives the last of their answers ever after."""
    true = honest(case)
    answers: list[Any] = []

    def run(x: Any, w: Any) -> Any:
        if len(answers) < 4:
            answers.append(true(x, w))
        return answers[-1].clone()

    return run


def no_check(case: Any) -> Call:
    """Does nothing, and has the check find nothing."""
    import torch

    def run(x: Any, w: Any) -> Any:
        for name, module in list(sys.modules.items()):
            if name.startswith("kernelmark.suite.measure.") and hasattr(module, "deviation"):
                vars(module)["deviation"] = lambda *given: 0.0
        return torch.zeros_like(x)

    return run


def _stopped(*given: object) -> int:
    return 0


def no_clock(case: Any) -> Call:
    """Stops Python's clock, and is honest else."""
    true = honest(case)

    def run(x: Any, w: Any) -> Any:
        time.perf_counter_ns = time.perf_counter = _stopped
        return true(x, w)

    return run


def no_timer(case: Any) -> Call:
    """Has the harness's timers and CUDA's events measure nothing."""
    import torch

    true = honest(case)

    def run(x: Any, w: Any) -> Any:
        from kernelmark.suite.measure.timers import Monotonic

        def sample(self: Any, call: Any, *more: Any) -> list[float]:
            call()
            return [1e-3]

        Monotonic.sample = sample  # type: ignore[assignment,method-assign]  # that is the point
        torch.cuda.Event.elapsed_time = lambda *given: 1e-3  # type: ignore[method-assign]  # that is the point
        return true(x, w)

    return run


def sabotage(case: Any) -> Call:
    """Is honest, and makes a function of torch slow for everybody after it."""
    import torch

    true = honest(case)
    quick = torch.matmul

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return quick(*given, **named)

    def run(x: Any, w: Any) -> Any:
        torch.matmul = slow
        return true(x, w)

    return run


def switches(case: Any) -> Call:
    """Is honest, and leaves every switch of the process in another position."""
    import torch

    true = honest(case)

    def run(x: Any, w: Any) -> Any:
        torch.set_float32_matmul_precision("highest")  # what it left is for others: it stays honest itself
        out = true(x, w)
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        os.environ["TRITON_PLANTED"] = "1"
        return out

    return run


OUTCOMES: dict[str, Literal["incorrect", "honest", "remarked"]] = {
    "by_pointer": "incorrect",
    "by_version": "honest",
    "by_ends": "incorrect",
    "lazy": "incorrect",
    "joined": "incorrect",
    "on_a_thread": "incorrect",
    "on_a_stream": "incorrect",
    "looks": "incorrect",
    "counts": "incorrect",
    "no_check": "incorrect",
    "no_clock": "incorrect",
    "no_timer": "incorrect",
    "sabotage": "incorrect",
    "switches": "remarked",
}
"""`incorrect`: its row has that status. `honest`: its time is that of the work, as its memory is of no use.
`remarked`: its row is ok and says what was put back; no other row is altered."""

NEED_GPU = ("on_a_stream",)

IMPLEMENTATIONS = {"chain": {name: globals()[name] for name in OUTCOMES}}
