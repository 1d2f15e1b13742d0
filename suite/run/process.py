"""A worker's process, as its supervisor holds it: started, listened to, ended with all that it started."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from ...registry.store.record import Status
from .worker import Message, Task

END_S = 10.0
"""How long a worker that is asked to end may take for it; one of Python alone takes no time."""


class OutOfTime(Exception):
    """The time given to measuring is over; what was finished is in the journal."""


class Worker:
    """A worker process and the pipe it speaks through."""

    def __init__(self, task: Task, python: Path, log: Path, until: float = math.inf) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log: IO[bytes] = open(log, "ab")  # noqa: SIM115  # closed in __exit__
        self._log_start = self._log.tell()
        self._late = False
        self._allowed_s = 0.0
        self._deadline = 0.0
        self._until = until
        self._reader, writer = os.pipe()
        self._process = subprocess.Popen(
            [str(python), "-m", f"{__package__}.worker", str(writer)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
        )
        try:
            os.close(writer)
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died at once; its end says why
                self._process.stdin.write(msgspec.json.encode(task))
                self._process.stdin.close()
        except BaseException:  # Ctrl-C, before anybody could end it
            self.kill()
            raise

    def allow(self, seconds: float) -> None:
        """From now on so long; whatever was allowed before is void."""
        self._allowed_s = seconds
        self._deadline = time.monotonic() + seconds

    def messages(self) -> Iterator[Message]:
        """Messages until the worker ends or its time is up; then nothing of it runs any more.

        Raises `OutOfTime` when all measuring is to stop.
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
                    self._process.wait()
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    yield decoder.decode(line)

    def fate(self) -> tuple[Status, str]:
        """How a worker ended that did not say `done`."""
        code = self._process.wait()
        if self._late:
            return "timeout", f"not finished within {self._allowed_s:g} s"
        if code < 0:
            with contextlib.suppress(ValueError):
                return "crashed", f"its process was ended by {signal.Signals(-code).name}"
        return "crashed", f"its process ended with exit code {code}"

    def last_words(self) -> str:
        """The end of what the worker printed."""
        self._log.flush()
        text = Path(self._log.name).read_bytes()[self._log_start :].decode(errors="replace").strip()
        return "It said: " + " | ".join(text.splitlines()[-3:]) if text else "It said nothing."

    def kill(self) -> None:
        """Ends the worker and all it started."""
        # Asked first: a worker in a container is ended by whoever stands for it here, who waits for that.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self.kill()
        else:
            with contextlib.suppress(ProcessLookupError):  # helpers that it left behind
                os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._reader)
        self._log.close()
