"""Where a Python process is, as faulthandler writes its stacks: what is late says so itself."""

from __future__ import annotations

import faulthandler
import re
import signal
from dataclasses import dataclass
from pathlib import PurePath

FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$', re.MULTILINE)
STACK = re.compile(r"^(?:Stack|(?:Current thread|Thread) 0x.*) \(most recent call first\):$", re.MULTILINE)
"""How a stack begins: alone, or among those of all threads, as a crash may write them."""
ASKED = "Stack (most recent call first):"
"""How the stack begins of a thread that was asked for its own: the main one, as Linux asks that first."""
WAITING = (
    "/asyncio/",
    "/concurrent/futures/",
    "/multiprocessing/",
    "/queue.py",
    "/selectors.py",
    "/socket.py",
    "/subprocess.py",
    "/threading.py",
)
"""Modules of Python in which a thread waits for whoever called them."""


@dataclass(frozen=True)
class Frame:
    """A place in a program."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        """A file's name only: reasons name no paths."""
        return f"{PurePath(self.path).name}:{self.line} {self.function}"


def tell_when_ended() -> None:
    """From now on SIGTERM prints where the main thread is, whatever code that is, before it ends this process.

    Only of that thread: others that start or end meanwhile would crash the walk over all of them.
    """
    faulthandler.register(signal.SIGTERM, file=2, all_threads=False, chain=True)


def frames(stack: str) -> list[Frame]:
    """The frames of one thread's stack, innermost first."""
    return [Frame(path, int(line), function) for path, line, function in FRAME.findall(stack)]


def of_asked(text: str) -> list[Frame]:
    """The frames of the thread that was asked, in what else a process wrote; none if it wrote no stack."""
    begin = text.rfind(ASKED)
    if begin < 0:
        return []
    rest = text[text.index("\n", begin) + 1 :] if "\n" in text[begin:] else ""
    end = STACK.search(rest)
    return frames(rest[: end.start()] if end else rest)


def busy(stack: list[Frame]) -> Frame | None:
    """The innermost frame that does not only wait; that of all if all do."""
    return next((x for x in stack if not any(y in x.path for y in WAITING)), stack[0] if stack else None)


def without(text: str) -> str:
    """What a process wrote beside stacks."""
    return "\n".join(x for x in text.splitlines() if not (STACK.match(x) or FRAME.match(x) or x == "  ..."))
