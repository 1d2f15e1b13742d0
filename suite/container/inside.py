"""Starts a worker in a container and ends it with its connection.

    python -m kernelmark.suite.container.inside -m MODULE

Standard input is a line with the worker's task, and then nothing until whoever sent it is gone. Messages go to
standard output, what the worker prints to standard error. Ends as the worker does: 128 and a signal's number where
that ended it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(*command: str) -> int:
    """Runs `python COMMAND PIPE` with the task as its input, to its end or that of our own input."""
    task = sys.stdin.buffer.readline()
    pipe = os.dup(1)
    worker = subprocess.Popen(
        [sys.executable, *command, str(pipe)],
        stdin=subprocess.PIPE,
        stdout=2,
        pass_fds=(pipe,),
        start_new_session=True,
    )
    os.close(pipe)
    threading.Thread(target=_ends_with_input, args=(worker.pid,), daemon=True).start()
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once; its end says why
        worker.stdin.write(task)
        worker.stdin.close()
    code = worker.wait()
    _end(worker.pid)  # helpers that it left behind
    return code if code >= 0 else 128 - code


def _ends_with_input(group: int) -> None:
    while os.read(0, 1 << 16):
        pass
    _end(group)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
