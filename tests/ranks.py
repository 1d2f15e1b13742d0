"""Ranks in tests: a function in several processes forked from this one, in a gloo group as the harness makes it.

Forked, as loading torch takes each process seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import socket
import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist
from kernelmark.kernels.collective._peers import Peers
from kernelmark.suite.measure.ranks import LOOPBACK, join
from torch.utils._python_dispatch import TorchDispatchMode

LATE_S = 150.0
"""A rank that is not done by then hangs: it says where, and ends, before its test is ended without a word."""


class Quiet:
    """A watcher that nobody asks."""

    def failed(self, count, failure):
        pass

    def settled(self, count):
        pass


def spread(world, function, *arguments):
    """What `function(group, *arguments)` gives in each of so many ranks; raises what any of them raised."""
    os.environ.update(LOOPBACK)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    pipes = []
    for rank in range(world):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os._exit(_rank(rank, world, port, listener if rank == 0 else None, writer, function, arguments))
        os.close(writer)
        pipes.append(reader)
    listener.close()
    found = []
    for reader in pipes:
        with open(reader, "rb") as pipe:
            found.append(pickle.loads(pipe.read() or pickle.dumps((False, "a rank ended"))))
    for _ in range(world):
        os.wait()
    for good, value in found:
        assert good, value
    return [value for _, value in found]


def _rank(rank, world, port, listener, writer, function, arguments) -> int:
    faulthandler.dump_traceback_later(LATE_S, exit=True, file=sys.__stderr__)
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    # What torch 2.13 calls deprecated is all that the GPUs' torch, 2.11, has.
    warnings.simplefilter("ignore", FutureWarning)
    try:
        device = torch.device("cpu")
        group = join(rank, world, port, device, Quiet(), listener.detach() if listener else None)
        said = True, function(group, *arguments)
        group.every(None)  # nobody leaves while others read from it
    except Exception:
        said = False, traceback.format_exc()
    with open(writer, "wb") as pipe:
        pickle.dump(said, pipe)
    return 0


class Sent(TorchDispatchMode):
    """How often processes spoke to one another."""

    count = 0

    def __torch_dispatch__(self, function, types, given=(), named=None):
        self.count += function.namespace == "c10d"
        return function(*given, **(named or {}))


def places(world, size):
    """A place of so many bytes for each rank, which forked processes share."""
    return [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(world)]


class Processes(Peers):
    """Peers of kernels that are processes: a place is memory that all have mapped, meetings are real, and what is
    beside other work is done at once.
    """

    def __init__(self, group, memory):
        self.rank, self.world, self._places = group.rank, group.size, memory

    def place(self, rank, shape, dtype):
        return self._places[rank][: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def meet(self, channel):
        dist.barrier()

    def beside(self, number):
        return contextlib.nullcontext()

    def wait(self, number):
        """It is done."""


class Late(Processes):
    """A rank is late by chance before and after every meeting, whose channels it keeps."""

    def __init__(self, group, memory):
        super().__init__(group, memory)
        self.met = []
        self._late = random.Random(group.rank)

    def meet(self, channel):
        self.met.append(channel)
        time.sleep(self._late.choice((0, 0, 0.004)))
        super().meet(channel)
        time.sleep(self._late.choice((0, 0, 0.004)))


def array(rank, call, size, dtype):
    """What a rank has at a call, drawn anew by whoever asks."""
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)
