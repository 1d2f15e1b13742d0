"""A worker's process, as its supervisor holds it: started, listened to, ended with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, ClassVar

import msgspec

from ...registry.errors import HarnessError, ended
from ...registry.store.record import Status
from ..measure.stacks import busy, of_asked, without
from .forkserver import Forked, ForkServer
from .messages import Message, Task
from .worker import environment

END_S = 10.0
"""How long a worker that is asked to end may take for it; one of Python alone takes no time."""
KILLED_S = 60.0
"""How long one may take that was killed: a driver lets go of a GPU first, and waits for what runs there."""
PRINTED = 4 << 20
"""Bytes of what a worker prints that are kept: a kernel may print without end."""
LAST_WORDS = 32 << 10
"""Bytes of its end that are kept in any case: where it was when it was late is a hundred lines."""
LONGEST_MESSAGE = 256 << 20
"""Bytes of a line on its pipe: the samples of a measurement are some kilobytes."""


class OutOfTime(Exception):
    """The time given to measuring is over; what was finished is in the journal."""


class Garbled(Exception):
    """Something came through the pipe that is no message."""


class Output:
    """What a worker prints, taken from a pipe and kept up to a bound, so that it fills neither disk nor pipe."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = open(log, "ab", buffering=0)  # noqa: SIM115  # closed in `close`
        self._last: deque[bytes] = deque()
        self._kept = 0
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._read, name="worker output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with open(self._reader, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                self._take(data)

    def _take(self, data: bytes) -> None:
        self._last.append(data)
        while sum(map(len, self._last)) - len(self._last[0]) >= LAST_WORDS:
            self._last.popleft()
        room = PRINTED - self._kept
        if room <= 0:
            return
        self._kept += len(data)
        with contextlib.suppress(OSError):  # a full disk: what is measured matters more than what is printed
            self._log.write(data[:room])
            if self._kept >= PRINTED:
                self._log.write(b"\n[more was printed than is kept]\n")

    @property
    def end(self) -> str:
        """The end of it all."""
        return b"".join(self._last)[-LAST_WORDS:].decode(errors="replace")

    def last_lines(self) -> list[str]:
        """The last lines that are not empty, without where it said that it was."""
        return without(self.end).strip().splitlines()[-3:]

    def close(self) -> None:
        """Once all that printed has ended; what still holds the pipe open is not waited for."""
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._log.close()


class Worker:
    """A worker process and the pipe it speaks through. With a `server` it is forked, else started from nothing."""

    _alive: ClassVar[set[int]] = set()
    _starting: ClassVar[threading.Lock] = threading.Lock()
    """Held until a worker that was started is one that is alive: another's thread may be looking for orphans."""

    def __init__(
        self,
        task: Task,
        python: Path,
        log: Path,
        until: float = math.inf,
        server: ForkServer | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        _adopt_orphans()
        self._strangers = _children()
        self._shared = _shared_memory()
        self._output = Output(log)
        self._late = False
        self._allowed_s = 0.0
        self._deadline = 0.0
        self._until = until
        self._token = task.token.encode()
        self._reader, writer = os.pipe()
        stdin, asked = os.pipe()
        try:
            with self._starting:
                forked = server.fork(stdin, self._output.writer, writer) if server else None
                if server and forked is None:
                    # A fork that comes late holds this pipe too: there it reads its end, never the task.
                    unused = stdin, asked
                    stdin, asked = os.pipe()
                    for descriptor in unused:
                        os.close(descriptor)
                self._process = forked or _started(python, stdin, self._output.writer, writer, variables or {})
                self._alive.add(self._process.pid)
        except BaseException:
            os.close(asked)
            raise
        finally:
            for descriptor in (stdin, writer, self._output.writer):
                os.close(descriptor)
        try:
            with contextlib.suppress(BrokenPipeError), open(asked, "wb") as task_of:  # it died: its end says why
                task_of.write(msgspec.json.encode(task))
        except BaseException:  # Ctrl-C, before anybody could end it
            self.kill()
            raise

    @property
    def forked(self) -> bool:
        """Whether it began in a fork server, and not from nothing."""
        return isinstance(self._process, Forked)

    def allow(self, seconds: float) -> None:
        """From now on so long; whatever was allowed before is void."""
        self._allowed_s = seconds
        self._deadline = time.monotonic() + seconds

    def messages(self) -> Iterator[Message]:
        """Messages until the worker ends or its time is up; then nothing of it runs any more.

        Raises `OutOfTime` when all measuring is to stop, `Garbled` for what is no message.
        """
        decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                left = min(self._deadline, self._until) - now
                if now >= self._until:
                    raise OutOfTime
                if left <= 0:
                    self._late = True
                    self.kill()
                    return
                ended = self._process.poll() is not None
                if not selector.select(min(left, 1.0)):
                    if ended:  # and a helper that it left behind keeps the pipe open
                        return
                    continue
                data = os.read(self._reader, 1 << 20)
                if not data:
                    try:
                        self._process.wait(END_S)
                    except subprocess.TimeoutExpired:  # it said all that it had to say, and hangs at its end
                        self.kill()
                    return
                *lines, pending = (pending + data).split(b"\n")
                if len(pending) > LONGEST_MESSAGE:
                    raise Garbled("a line without end came through its pipe")
                for line in lines:
                    if not line.startswith(self._token):
                        raise Garbled("what came through its pipe is not of the harness")
                    try:
                        yield decoder.decode(line[len(self._token) :])
                    except (msgspec.MsgspecError, ValueError, RecursionError):
                        raise Garbled("what came through its pipe is no message") from None

    def fate(self) -> tuple[Status, str]:
        """How a worker ended that did not say `done`."""
        code = self._process.wait()
        if self._late:
            self._output.close()
            place = busy(of_asked(self._output.end))
            return "timeout", f"not finished within {self._allowed_s:g} s" + (f", at {place}" if place else "")
        return "crashed", ended(code)

    @property
    def killed(self) -> bool:
        """Whether somebody ended it from outside by a signal: the system for want of memory, say."""
        return not self._late and (self._process.poll() or 0) < 0

    def last_words(self) -> str:
        """The end of what the worker printed."""
        self._output.close()
        found = self._output.last_lines()
        return "It said: " + " | ".join(found) if found else "It said nothing."

    def kill(self) -> None:
        """Ends the worker and all it started."""
        # Asked first: it prints where it is, and one in a container is ended by whoever stands for it here, who
        # waits for that.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            raise HarnessError(
                f"process {self._process.pid} was killed {KILLED_S:g} s ago and is still there: a driver has it. "
                "Nothing can be measured on its GPUs until it is gone."
            ) from None

    def _orphans(self) -> set[int]:
        """Children of ours that neither this process nor a worker that is alive started: they are of no session of
        ours, and were not there before this worker.
        """
        with self._starting:
            found = _children() - self._strangers - self._alive
        return {x for x in found if not _ours(x)}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self.kill()
        else:
            with contextlib.suppress(ProcessLookupError):  # helpers that it left behind
                os.killpg(self._process.pid, signal.SIGKILL)
        self._alive.discard(self._process.pid)
        _end_orphans(self._orphans)
        _free(_shared_memory() - self._shared)
        os.close(self._reader)
        self._output.close()


def _started(
    python: Path, stdin: int, output: int, pipe: int, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A worker from nothing."""
    return subprocess.Popen(
        [str(python), "-m", f"{__package__}.worker", str(pipe)],
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=(pipe,),
        start_new_session=True,
        env=environment(variables),
    )


SHARED_MEMORY = Path("/dev/shm")
RANKS_FILES = ("nccl-", "torch_", "nvshmem-")
"""How names of shared memory begin that ranks which are killed leave behind."""


def _shared_memory() -> set[Path]:
    """Files of shared memory of the kinds that ranks make."""
    with contextlib.suppress(OSError):
        return {x for x in SHARED_MEMORY.iterdir() if x.name.startswith(RANKS_FILES)}
    return set()


def _free(files: set[Path]) -> None:
    """Removes those of our own that no process has mapped or open any more: another run may be using its own."""
    for path in files:
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid() and not _used(path):
                path.unlink()


def _used(path: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f" {path}\n" in (process / "maps").read_text(errors="replace"):
                return True
            if any(os.readlink(x) == str(path) for x in (process / "fd").iterdir()):
                return True
    return False


def _adopt_orphans() -> None:
    """What a worker leaves behind in a session of its own becomes our child, and can be ended (Linux)."""
    PR_SET_CHILD_SUBREAPER = 36
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    """Ids of our children, those that ended and were not waited for among them; none where /proc does not say."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for task in Path("/proc/self/task").iterdir():
            found |= {int(x) for x in (task / "children").read_text().split()}
    return found


def _ours(pid: int) -> bool:
    """Whether a process is of our own session, as what we start for a moment is (git, say): a worker and all that
    it starts are of others.
    """
    with contextlib.suppress(OSError):
        return os.getsid(pid) == os.getsid(0)
    return False


def _end_orphans(find: Callable[[], set[int]]) -> None:
    """Ends the children that a worker left behind, and theirs, which become ours in turn."""
    end = time.monotonic() + END_S
    while (orphans := find()) and time.monotonic() < end:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < end:
                    time.sleep(0.005)
