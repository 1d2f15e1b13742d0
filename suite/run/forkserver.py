"""Workers forked from a process that has torch loaded and has touched no device.

Loading torch is most of what starting a worker takes, and an A/B starts dozens. Each is a process of its own all
the same: it makes its own CUDA context, loads what it measures itself, and ends alone. What it shares with the
others, on both sides of a comparison, is where torch lies in memory; what comes after torch is shifted by a random
distance, so that a lucky place in memory does not stay with one side.

With `compiler` it has loaded torch.compile for CPUs too, and knows which vector instructions the C++ compiler here
builds for: what every process that compiles would find out for itself, in seconds.

A server that cannot be had (another system, an interpreter in a container, torch that starts threads) is None, and
workers are started as ever.

The server forks twice: the one between ends at once, and the worker becomes the supervisor's child (it adopts
orphans, see `process.py`), which then waits for it and ends it like any other.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from .worker import die_with_parent, environment

READY = b"ready"
NONE = b"0"
"""The answer where a worker was ended before it could say its number; the next one may do better."""
START_S = 60.0
"""Loading torch from a cold disk may take so long."""
ANSWER_S = 10.0
ADOPTED_S = 10.0
"""How long a worker waits to become the supervisor's child; where that was killed, it never will."""
END_S = 5.0
SHIFT_PAGES = 4096
"""The random distance is below so many pages: 16 MiB."""


class Forked:
    """A forked worker, with what the supervisor uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`."""
        if timeout is None and self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        end = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(["worker"], timeout or 0.0)
            time.sleep(0.005)
        return code

    def terminate(self) -> None:
        """Asks it to end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """A process that forks workers for one interpreter."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self.dead = False
        """Whether it failed to answer once: what it says later would be taken for the next answer."""

    @classmethod
    def begin(cls, python: Path, compiler: bool = False) -> ForkServer:
        """One that is loading torch; `ready` waits for it. Raises `OSError` where no process can be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [str(python), "-m", __name__, str(theirs.fileno()), str(os.getpid()), str(int(compiler))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a worker that is started in its stead says what is wrong
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env=environment(),
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    def ready(self) -> bool:
        """Waits until it can fork. Where this interpreter cannot be a server, it is ended."""
        with contextlib.suppress(OSError):
            self._channel.settimeout(START_S)
            if self._channel.recv(len(READY)) == READY:
                return True
        self.close()
        return False

    def fork(self, stdin: int, output: int, pipe: int) -> Forked | None:
        """A worker with these file descriptors; None if the server is gone or does not answer, for good then.

        One that did not answer may fork all the same, later: nothing may be written to this `stdin` any more.
        """
        if self.dead:
            return None
        try:
            self._channel.settimeout(ANSWER_S)
            socket.send_fds(self._channel, [b"fork"], [stdin, output, pipe])
            answer = self._channel.recv(32)
        except OSError:
            answer = b""
        if not answer:
            self.dead = True
            self._process.kill()
            self._channel.close()
            return None
        return None if answer == NONE else Forked(int(answer))

    def close(self) -> None:
        """Ends the server; workers that it forked are the supervisor's."""
        self._channel.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkServers:
    """Fork servers by interpreter, each started when it is first asked for, all ended together."""

    def __init__(self, compiler: bool = False) -> None:
        self._compiler = compiler
        self._servers: dict[Path, ForkServer | None] = {}
        self._loading: set[Path] = set()

    def begin(self, python: Path) -> None:
        """Starts the server of an interpreter and does not wait for it: it loads while others work."""
        if python in self._servers:
            return
        self._servers[python] = None
        with contextlib.suppress(OSError):  # no interpreter at all: the worker that is started says so
            if sys.platform == "linux":
                self._servers[python] = ForkServer.begin(python, self._compiler)
                self._loading.add(python)

    def of(self, python: Path) -> ForkServer | None:
        """The server of an interpreter; None where it cannot have one, or has one no more."""
        self.begin(python)
        server = self._servers[python]
        if server is not None and python in self._loading:
            # Held until it has answered: whoever is interrupted here ends it with the others.
            if not server.ready():
                server = self._servers[python] = None
            self._loading.remove(python)
        return None if server is None or server.dead else server

    def __enter__(self) -> ForkServers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all of them."""
        for server in self._servers.values():
            if server is not None:
                server.close()


def main(descriptor: int, supervisor: int, compiler: bool) -> None:
    """The server: loads torch, then forks a worker for each message, until nobody holds the other end."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Their OpenBLAS has threads, which it ends before a fork and starts again where needed.
    import numpy  # noqa: F401
    import scipy.special  # noqa: F401

    threads = _threads()
    import torch
    import torch._functorch.config

    with contextlib.suppress(ImportError):
        import triton  # noqa: F401  # as of torch, most of its time is loading
    if compiler:
        _load_compiler()
    if _threads() > threads or torch.cuda.is_initialized():
        sys.exit("torch has started threads or opened a device: nothing can be forked")
    gc.collect()
    gc.freeze()  # else a collection in a worker would copy every page of it
    with socket.socket(fileno=descriptor) as channel:
        channel.sendall(READY)
        while True:
            asked, descriptors, _, _ = socket.recv_fds(channel, 16, 3)
            if not asked:
                return
            channel.sendall(str(_forked(channel, descriptors, supervisor)).encode())


def _load_compiler() -> None:
    """Loads torch.compile for CPUs, while the C++ compiler tries the vector instructions in its own processes."""
    from torch._inductor import cpu_vec_isa

    def tried() -> None:
        with contextlib.suppress(Exception):  # no compiler, say: whoever compiles will hear of it
            here = set(cpu_vec_isa.x86_isa_checker()) if platform.machine() == "x86_64" else set()
            known = [x for x in cpu_vec_isa.supported_vec_isa_list if set(str(x).split()) <= here]
            with ThreadPoolExecutor(max(1, len(known))) as pool:
                list(pool.map(bool, known))
            cpu_vec_isa.valid_vec_isa_list()

    trying = threading.Thread(target=tried)
    trying.start()
    import torch._inductor.compile_fx
    import torch.utils.cpp_extension  # noqa: F401  # what forks would each load

    trying.join()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _forked(channel: socket.socket, descriptors: list[int], supervisor: int) -> int:
    """Forks a worker that is the supervisor's child; its process id.

    It says that itself once its session is its own: whoever knows it can end the worker with all that it started.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork() == 0:
            os.close(reader)
            channel.close()
            _become_worker(descriptors, writer, supervisor)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(writer)
    for descriptor in descriptors:
        os.close(descriptor)
    with open(reader, "rb") as pipe:
        return int(pipe.read() or NONE)


def _become_worker(descriptors: list[int], born: int, supervisor: int) -> NoReturn:
    """In a worker's process: its own session, of which `born` hears, descriptors and place in memory; then as if
    it were started.
    """
    from . import worker

    status = 1
    try:
        os.setsid()
        os.write(born, str(os.getpid()).encode())
        os.close(born)
        stdin, output, pipe = descriptors
        for descriptor, place in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, place)
        os.close(stdin)
        os.close(output)
        until = time.monotonic() + ADOPTED_S
        while os.getppid() != supervisor:  # the one between has not ended yet
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(0.001)
        shift = mmap.mmap(-1, random.SystemRandom().randrange(1, SHIFT_PAGES) * mmap.PAGESIZE)
        worker.main(pipe)
        del shift
        worker.end()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
