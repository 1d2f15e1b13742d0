"""Processes that tests start, and waiting for what they do."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for(condition, what, seconds=60.0):
    """The first true value of a condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")


def children(pid: int) -> list[int]:
    """Processes that a process started and that live."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(x) for x in text.split()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that is only waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
