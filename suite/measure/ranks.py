"""The processes behind a case on several GPUs: rank 0 is the worker, which starts the others and ends with them.

One fate: a rank that dies, fails while others wait for it, or does not come back in time ends the case, and with
it all ranks, whatever call they are in. Who it was, and how, is the case's reason.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ...registry.errors import ended
from .group import Failure, Ranked
from .stacks import frames

if TYPE_CHECKING:
    import torch

NO_MULTICAST: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Multicast objects can put GPUs that others share out of service: no case on several GPUs without these."""
LOOPBACK: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All ranks are of one host; they listen to nobody else."""
START_S = 120.0
"""How long ranks may take to load torch, to open their devices and to meet."""
GRACE_S = 5.0
"""How long ranks may take to the end of a stage that one of them failed in; then they wait for it in a call."""
END_S = 5.0
"""How long a rank may take to end when it is told to, and when it is killed: a driver may hold it even then."""
TICK_S = 0.05
LOOK_S = 1.0
"""How long to wait for a rank to say where it is."""
WAITING = ("distributed/", "suite/measure/group.py", "multiprocessing/connection.py")
"""Innermost frames of a rank that waits for others."""


class Lost(Exception):
    """A rank died or did not come back; the text says which and how."""

    def __init__(self, text: str, late: bool = False) -> None:
        super().__init__(text)
        self.late = late


def require_no_multicast(environment: Mapping[str, str]) -> None:
    """Raises RuntimeError unless the variables are set that keep multicast off."""
    wrong = [f"{name}={value}" for name, value in NO_MULTICAST.items() if environment.get(name) != value]
    if wrong:
        raise RuntimeError(
            f"no case on several GPUs without {' '.join(wrong)}: multicast can put shared GPUs out of service"
        )


@dataclass
class _Follower:
    """A rank's process, and the connection that it is told through."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    frames: int
    """The file descriptor that it writes its stack to when asked by SIGUSR1."""


class Ranks:
    """A world's other ranks, and rank 0's place among them. A process makes one of these, ever: what torch and
    libraries remember of a group (communicators, addresses of peers' memory) outlives it and has its name.

    `command` starts a rank's program; behind it come the rank, the world, the store's port and two file
    descriptors (`Place.of`). It reads `task` from its standard input. `lost` is called, in another thread, with
    the reason why a case cannot go on; it must end the process.
    """

    def __init__(
        self,
        world: int,
        device: torch.device,
        command: Sequence[str],
        task: bytes,
        lost: Callable[[Exception], None],
    ) -> None:
        if world > 1:
            require_no_multicast(os.environ)
        self.world = world
        self._lost = lost
        self._lock = threading.Lock()
        self._until: float | None = None
        self._limit_s = 0.0
        self._failed: tuple[int, Failure, float] | None = None
        self._settled = 0
        self._closing = False
        self._followers: list[_Follower] = []
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        for rank in range(1, world):
            self._followers.append(_start(rank, world, port, command, task))
        self.allow(START_S)
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()
        try:
            self.group = join(0, world, port, device, self, listener.detach())
        except BaseException:
            self._closing = True
            self.kill()
            raise

    def tell(self, message: object) -> None:
        """Sends every other rank what to do next."""
        for x in self._followers:
            with contextlib.suppress(OSError):  # it is gone, which the watch finds out and says
                x.connection.send(message)

    def allow(self, seconds: float | None) -> None:
        """From now on the ranks have so long; None: nothing is under way."""
        with self._lock:
            self._limit_s = seconds or 0.0
            self._until = None if seconds is None else time.monotonic() + seconds

    def failed(self, count: int, failure: Failure) -> None:
        with self._lock:
            if count > self._settled and (self._failed is None or count > self._failed[0]):
                self._failed = count, failure, time.monotonic() + GRACE_S

    def settled(self, count: int) -> None:
        with self._lock:
            self._settled = count
            if self._failed is not None and self._failed[0] <= count:
                self._failed = None

    def close(self) -> None:
        """Ends the other ranks in order, or else by force. Nothing may be asked of any rank after.

        Process groups are not given up: NCCL waits for all ranks in that, and for every graph that holds one of
        its calls. They end with the processes.
        """
        self._closing = True
        self._thread.join()
        for x in self._followers:
            x.connection.close()
        end = time.monotonic() + END_S
        for x in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                x.process.wait(max(0.0, end - time.monotonic()))
        self.kill()
        for x in self._followers:
            os.close(x.frames)

    def kill(self) -> None:
        """Ends the ranks by force. What a driver holds even then is left to whoever started this process."""
        for x in self._followers:
            x.process.kill()
        end = time.monotonic() + END_S
        for x in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                x.process.wait(max(0.0, end - time.monotonic()))

    def _watch(self) -> None:
        """Looks at the ranks until one is lost or all are told to end."""
        connections = {x.connection: x for x in self._followers}
        while not self._closing:
            if not connections:
                time.sleep(TICK_S)
            for ready in wait(list(connections), TICK_S) if connections else ():
                if isinstance(ready, Connection):
                    self._hear(connections, ready)
            reason = self._reason()
            if reason is not None and not self._closing:
                self.kill()
                self._lost(reason)
                return

    def _hear(self, connections: dict[Connection, _Follower], ready: Connection) -> None:
        try:
            count, failure = ready.recv()
        except (EOFError, OSError):
            del connections[ready]  # its process ends, or has
        else:
            self.failed(count, failure)

    def _reason(self) -> Exception | None:
        """Why the case under way cannot go on, if it cannot."""
        for x in self._followers:
            code = x.process.poll()
            if code is not None:
                return Lost(f"rank {x.rank} of {self.world}: {ended(code)}")
        now = time.monotonic()
        with self._lock:
            failed, until = self._failed, self._until
        if failed is not None and now >= failed[2]:
            return failed[1].error(self.world)
        if until is not None and now >= until:
            return Lost(f"not finished within {self._limit_s:g} s: {self._where()}", late=True)
        return None

    def _where(self) -> str:
        """Which ranks are in code of their own while others wait, as far as their stacks say."""
        places = {0: _place(_own_stack())}
        for x in self._followers:
            with contextlib.suppress(ProcessLookupError):
                x.process.send_signal(signal.SIGUSR1)
        for x in self._followers:
            places[x.rank] = _place(_read(x.frames))
        busy = {rank: place for rank, place in places.items() if place is not None}
        if not busy or len(busy) == self.world:
            return f"all {self.world} ranks wait" if not busy else f"no rank of {self.world} came back"
        told = ", ".join(f"rank {rank} of {self.world} is in {place}" for rank, place in busy.items())
        return f"{told}; the others wait"


def _start(rank: int, world: int, port: int, command: Sequence[str], task: bytes) -> _Follower:
    own, theirs = socket.socketpair()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    process = subprocess.Popen(
        [*command, str(rank), str(world), str(port), str(theirs.fileno()), str(writer)],
        stdin=subprocess.PIPE,
        pass_fds=(theirs.fileno(), writer),
    )
    theirs.close()
    os.close(writer)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once, which the watch finds out
        process.stdin.write(task)
        process.stdin.close()
    return _Follower(rank, process, Connection(own.detach()), reader)


def _own_stack() -> str:
    """The main thread's stack, innermost frame first, as faulthandler writes it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = []
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def _read(pipe: int) -> str:
    """What comes through a pipe until nothing more does."""
    found = b""
    end = time.monotonic() + LOOK_S
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            if data := os.read(pipe, 1 << 16):
                found += data
                continue
        if found:
            break
        time.sleep(TICK_S)
    return found.decode(errors="replace")


def _place(stack: str) -> str | None:
    """File, line and function of the innermost frame; None where that waits for other ranks."""
    found = frames(stack)
    if not found:
        return "code that does not answer"
    return None if any(x in found[0].path for x in WAITING) else str(found[0])


@dataclass(frozen=True)
class Place:
    """What a rank's program is told on its command line."""

    rank: int
    world: int
    port: int
    connection: int
    frames: int

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Place:
        """From the last arguments of `Ranks`' command."""
        return cls(*map(int, arguments))


class Follower:
    """A rank that is not the first, in its own process: a watcher that tells rank 0, and what it is told to do."""

    def __init__(self, place: Place) -> None:
        self._connection = Connection(place.connection)
        self._lock = threading.Lock()
        faulthandler.register(signal.SIGUSR1, file=place.frames, all_threads=False)

    def failed(self, count: int, failure: Failure) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._connection.send((count, failure))

    def settled(self, count: int) -> None:
        """Rank 0 sees that by itself."""

    def orders(self) -> Iterator[Any]:
        """What rank 0 tells, until it closes."""
        while True:
            try:
                yield self._connection.recv()
            except (EOFError, OSError):
                return


def join(
    rank: int, world: int, port: int, device: torch.device, watcher: Any, listener: int | None = None
) -> Ranked:
    """Takes a place in torch's process groups, which all ranks do at once. `listener` is rank 0's open socket."""
    import torch.distributed as dist

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})  # some libraries read them
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK["GLOO_SOCKET_IFNAME"])
    forever = timedelta(hours=1)  # nothing times out before the case does
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch takes it from C and names it nowhere
        "127.0.0.1", port, world, rank == 0, forever, wait_for_workers=False, master_listen_fd=listener
    )
    cuda = device.type == "cuda"
    if not cuda:
        _share_threads(world)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    own = device if cuda else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=forever, device_id=own)
    control = dist.new_group(backend="gloo", timeout=forever)
    data = dist.new_group(backend="nccl", timeout=forever) if cuda else control
    return Ranked(rank, world, control, data, watcher, device)


def _share_threads(world: int) -> None:
    """Ranks of a CPU share its cores."""
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // world))
