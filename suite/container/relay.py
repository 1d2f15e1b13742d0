"""A worker in a container, for whoever takes this process for it: its task goes in, messages and output come out.

    python -m kernelmark.suite.container.relay ENGINE CONTAINER -m MODULE PIPE

Ends as the worker ends. Asked to end (SIGTERM) it first sees the worker's end; killed, it leaves that to
`inside.py`, which knows by the connection that nobody listens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

HARNESS = "/harness"
"""Where the harness lies in a container a second time, for Python to find it before the image's own."""
END_S = 8.0
"""How long the end of a worker there may take, once it was asked for."""


def main(address: str, container: str, *arguments: str) -> int:
    """Runs `python ARGUMENTS` in a container until it ends; the last argument is the descriptor for messages."""
    import docker
    from docker.utils.socket import STDOUT, frames_iter

    signal.signal(signal.SIGTERM, _asked_to_end)
    *command, pipe = arguments
    api = docker.APIClient(base_url=address)
    inside = ["python", "-m", f"{__package__}.inside", *command]
    run = api.exec_create(container, inside, stdin=True, environment=_environment())["Id"]
    stream = api.exec_start(run, socket=True)
    # The SDK's object only reads. What it reads for how long is the supervisor's to judge.
    with socket.socket(fileno=os.dup(stream.fileno())) as connection:
        connection.settimeout(None)
        try:
            connection.sendall(sys.stdin.buffer.read() + b"\n")
            for kind, data in frames_iter(stream, tty=False):
                _write(int(pipe) if kind == STDOUT else 1, data)
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            end = time.monotonic() + END_S
            while api.exec_inspect(run)["Running"] and time.monotonic() < end:
                time.sleep(0.02)
    return int(api.exec_inspect(run)["ExitCode"])


def _environment() -> dict[str, str]:
    """What a Python there is told: where the harness is, and roots of kernels beside it."""
    roots = (str(Path(x).resolve()) for x in os.environ.get("KERNELMARK_PATH", "").split(os.pathsep) if x)
    return {
        "PYTHONPATH": HARNESS,
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "KERNELMARK_PATH": os.pathsep.join(roots),
    }


def _asked_to_end(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the supervisor, which ends us in order
    code = main(*sys.argv[1:])
    if code > 128:  # ended by a signal there, as this then is here
        with contextlib.suppress(OSError, ValueError):
            signal.signal(code - 128, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), code - 128)
    sys.exit(code)
