"""A worker in a container, for whoever takes this process for it: its task goes in, messages and output come out.

    python -m kernelmark.suite.container.relay ENGINE CONTAINER -m MODULE PIPE

Ends as the worker ends. When it is killed, its connection to the engine is closed, by which `inside.py` knows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from .interpreter import ENVIRONMENT


def main(address: str, container: str, *arguments: str) -> int:
    """Runs `python ARGUMENTS` in a container until it ends; the last argument is the descriptor for messages."""
    import docker
    from docker.utils.socket import STDOUT, frames_iter

    *command, pipe = arguments
    api = docker.APIClient(base_url=address)
    inside = ["python", "-m", f"{__package__}.inside", *command]
    run = api.exec_create(container, inside, stdin=True, environment=ENVIRONMENT)["Id"]
    stream = api.exec_start(run, socket=True)
    # The SDK's object only reads. What it reads for how long is the supervisor's to judge.
    with socket.socket(fileno=os.dup(stream.fileno())) as connection:
        connection.settimeout(None)
        connection.sendall(sys.stdin.buffer.read() + b"\n")
        for kind, data in frames_iter(stream, tty=False):
            _write(int(pipe) if kind == STDOUT else 1, data)
    return int(api.exec_inspect(run)["ExitCode"])


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
