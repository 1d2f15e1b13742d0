"""Servers and clients as child processes: started with a deadline, asked on the loopback, ended whole."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import msgspec

from ....registry.errors import InputError, ended, first_error, last_line
from .messages import LOOPBACK, Result, Spec, Task

PACKAGE = __package__
SAID = 1 << 16
"""Bytes of a server's last words that a reason is looked for in."""
UNSUPPORTED = "NotImplementedError: "
"""What stands before the reason of a server of ours that does not run what it was asked for."""
QUOTED = 300
"""Characters of it that a reason quotes."""


class ServerFailed(Exception):
    """A server did not start, or went away; the message holds what it said of that."""


@dataclass
class Running:
    """A server that answers: where, by which path, under which name of its model."""

    host: str
    port: int
    path: str
    model: str
    words: bool
    extra: Mapping[str, Any]
    process: subprocess.Popen[bytes] | None = None
    output: IO[bytes] | None = None

    def alive(self) -> bool:
        """Whether its process still runs; one that was there before is taken to."""
        return self.process is None or self.process.poll() is None

    def get(self, path: str) -> Any:
        """What a GET gives, as JSON. Raises `OSError` where nobody answers, `ValueError` where it is no JSON."""
        import http.client  # here: listing loads this module

        connection = http.client.HTTPConnection(self.host, self.port, timeout=5)
        try:
            connection.request("GET", path)
            return msgspec.json.decode(connection.getresponse().read())
        except http.client.HTTPException as error:
            raise OSError(str(error)) from None
        finally:
            connection.close()

    def said(self) -> str:
        """What the server printed of its end: its first error, as the rest may be that its parts miss one another,
        or else its last line. Of one that had no time to print a word, the signal or exit code that it ended by.
        """
        if self.output is None:
            return ""
        self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, self.output.tell() - SAID))
        text = self.output.read().decode(errors="replace")
        code = None if self.process is None else self.process.poll()
        return (first_error(text) or last_line(text, "" if code is None else ended(code)))[:QUOTED]

    def stop(self, patience_s: float = 10.0) -> None:
        """Ends the server and all it started. A server that ends by itself has waited for its engine."""
        process = self.process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            if process.stdin is None:
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if self.output is not None:
            self.output.close()


def environment(**more: str) -> dict[str, str]:
    """Of a child: ours, with no proxy between it and the loopback."""
    proxies = {"http_proxy", "https_proxy", "all_proxy"}
    kept = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    return {**kept, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **more}


def ours(spec: Spec, deadline_s: float, path: str = "/v1/completions") -> Running:
    """Our own server, when it listens. Raises `ServerFailed`, or `NotImplementedError` where that is what it ended
    with: what its engine does not run is no failure.
    """
    output = TemporaryFile()  # noqa: SIM115  # closed in `Running.stop`
    process = subprocess.Popen(
        [sys.executable, "-m", f"{PACKAGE}.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        start_new_session=True,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    extra = {"ignore_eos": True}
    running = Running(LOOPBACK, 0, path, spec.model, path.endswith("chat/completions"), extra, process, output)
    try:
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
        line = _line(process.stdout, deadline_s)
        running.port = int(msgspec.json.decode(line)["port"])
    except (OSError, ValueError, KeyError, msgspec.MsgspecError, TimeoutError) as error:
        said = running.said()
        running.stop(0)
        if said.startswith(UNSUPPORTED):
            raise NotImplementedError(said.removeprefix(UNSUPPORTED)) from None
        raise ServerFailed(f"the server did not start: {said or error}") from None
    return running


def _line(pipe: IO[bytes], seconds: float) -> bytes:
    """The first line of a pipe. Raises `TimeoutError`; empty where it ended."""
    import select

    until, found = time.monotonic() + seconds, b""
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError(f"it said nothing for {seconds:.0f} s")
        data = os.read(pipe.fileno(), 1 << 12)
        if not data:
            raise OSError("it ended")
        found += data
    return found


def started(
    argv: Sequence[str],
    port: int,
    path: str,
    model: str,
    folder: Path,
    deadline_s: float,
    words: bool,
    extra: Mapping[str, Any],
    variables: Mapping[str, str],
) -> Running:
    """Another's server, when it answers on its port. Raises `ServerFailed`."""
    output = TemporaryFile()  # noqa: SIM115  # closed in `Running.stop`
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env=environment(**variables),
        )
    except OSError as error:
        raise ServerFailed(f"{argv[0]} cannot be started: {error.strerror}") from None
    running = Running(LOOPBACK, port, path, model, words, extra, process, output)
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if not running.alive():
            break
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1):
            return running
        time.sleep(0.1)
    said = running.said()
    what = f"did not answer within {deadline_s:.0f} s" if running.alive() else "ended before it answered"
    running.stop(0)
    raise ServerFailed(f"the server {what}: {said}")


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def loopback(url: str) -> tuple[str, int]:
    """Host and port of a URL of this machine. Raises `InputError` for any other."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host not in ("127.0.0.1", "localhost", "::1") or port is None or parts.scheme != "http":
        raise InputError("a server's URL is http://127.0.0.1:PORT: serve measures servers of this machine")
    return host, port


class Clients:
    """The client processes of one load, which share its requests."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.processes = []
        for _ in tasks:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{PACKAGE}.client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(),
            )
            self.processes.append(process)
        self.tasks = list(tasks)

    def results(self) -> list[Result]:
        """What all of them saw. Raises `ServerFailed` where one broke: no latency is then whole."""
        from concurrent.futures import ThreadPoolExecutor

        longest = max((x.begin_ns - time.monotonic_ns()) / 1e9 + x.deadline_s for x in self.tasks)

        def one(pair: tuple[subprocess.Popen[bytes], Task]) -> Result:
            process, task = pair
            try:
                out, err = process.communicate(msgspec.json.encode(task), timeout=max(1.0, longest) + 60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise ServerFailed("a client did not end") from None
            if process.returncode:
                said = err.decode(errors="replace").strip().splitlines()
                raise ServerFailed(f"a client broke: {said[-1][:300] if said else process.returncode}")
            return msgspec.json.decode(out, type=Result)

        with ThreadPoolExecutor(len(self.processes)) as pool:
            return list(pool.map(one, zip(self.processes, self.tasks, strict=True)))


CHUNKS_PER_CLIENT = 4000
"""Chunks a second that one client process is given at the most."""


def clients_for(chunks_per_s: float) -> int:
    """How many client processes a load takes; no more than half of the cores."""
    return max(1, min(math.ceil(chunks_per_s / CHUNKS_PER_CLIENT), (os.cpu_count() or 2) // 2))
