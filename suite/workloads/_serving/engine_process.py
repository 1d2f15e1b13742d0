"""The process of a server's engine: requests in, their tokens out, over pipes (`wire`).

The protocol has another process: in one, the threads of both would take turns, and the device would wait while
text is written.
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from typing import TYPE_CHECKING

import msgspec

from .messages import EngineSpec
from .wire import Ask, Build, Built, Failed, FromEngine, Gave, Inbox, Leave, framed, to_engine

if TYPE_CHECKING:
    from .engine import Engine


def engine(spec: EngineSpec) -> Engine:
    """The engine of a spec, its steps captured."""
    import torch

    from ...catalog import Catalog
    from ...model import chosen
    from ...system import Assembly, System
    from .. import _inference as inference
    from .engine import Engine

    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    catalog = Catalog.default()
    if spec.code:
        catalog = catalog.with_code(spec.code)
    system = msgspec.convert(spec.system, System)
    found = chosen(catalog.models, spec.model)
    if spec.slice != "whole":
        found = found.first(int(spec.slice.removeprefix("first")))
    device = torch.device(spec.device)
    weights = inference.initial(found, spec.dtype, spec.seed, device)
    made = Engine(Assembly(system, catalog), found, spec.dtype, weights, spec.sequences, spec.longest, spec.page)
    made.capture()
    return made


def run(inbox: Inbox, out: int) -> None:
    """Builds the engine that the first message asks for, and serves until the pipe ends."""
    from .scheduler import Scheduler

    def send(message: FromEngine) -> None:
        left = memoryview(framed(message))
        while left:
            left = left[os.write(out, left) :]

    waiting = inbox.take(wait=True)
    if not waiting:
        return
    first = to_engine(waiting.pop(0))
    assert isinstance(first, Build)
    scheduler = Scheduler(engine(first.spec), first.end, lambda made: send(Gave(made)))
    gc.collect()
    gc.freeze()  # what was built stays: looking through it again would stop all sequences
    send(Built())
    try:
        while not inbox.ended:
            for message in map(to_engine, waiting or inbox.take(wait=not scheduler.busy)):
                if isinstance(message, Ask):
                    scheduler.add(message.number, message.wanted)
                elif isinstance(message, Leave):
                    scheduler.give_up(message.number)
            waiting = []
            if scheduler.busy:
                scheduler.turn()
    except BrokenPipeError:
        raise  # nobody is there to be told
    except Exception as error:  # whatever a kernel raises ends the engine; those who wait are told
        traceback.print_exc()
        send(Failed(f"the engine failed: {type(error).__name__}: {str(error)[:200]}"))


def main() -> None:
    """One engine."""
    given, out, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # messages are no input of what a library starts
    os.dup2(2, 1)  # and what it prints is no message
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # whoever started us is gone
        run(Inbox(given), out)


if __name__ == "__main__":
    main()
