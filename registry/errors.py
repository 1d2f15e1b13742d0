"""Errors that end a command, each with its exit code (README.md lists them).

A case that does not end well is never one of these: it is a `Status` with a reason.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal


class KernelmarkError(Exception):
    """Base of what the command line prints as one message, without a traceback."""

    exit_code = 5


class InputError(KernelmarkError):
    """Wrong usage or input: the message says what is wrong, what exists and what to do."""

    exit_code = 2


class HarnessError(KernelmarkError):
    """The harness itself failed: no disk, no worker, a planted fault missed."""

    exit_code = 5


class Ended(KeyboardInterrupt):
    """Ended by a signal that is not Ctrl-C, in the same order. Shells expect 128 and the signal's number."""

    def __init__(self, signal: int) -> None:
        super().__init__()
        self.exit_code = 128 + signal


def first_line(said: object, otherwise: str = "") -> str:
    """The first line of an exception's text or a program's output, for one line of a message; where it ends in a
    colon, with what it announces.
    """
    lines = [x.strip() for x in text_of(said).splitlines() if x.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else otherwise


def text_of(said: object) -> str:
    """An exception's text, whoever wrote it: one that cannot be made, or written down, is no other failure."""
    try:
        text = str(said)
    except Exception as error:
        return f"its text cannot be made: {type(error).__name__}"
    return text.encode(errors="replace").decode()  # a surrogate alone is no text


def last_line(said: str, otherwise: str = "it said nothing") -> str:
    """The last line: a program that fails says there why."""
    return (said.strip().splitlines() or [otherwise])[-1]


def ended(code: int) -> str:
    """How a process ended, by its exit code as Python gives it: below 0 a signal's number."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


_ERROR = re.compile(r"(?:^|[\])] )((?:[a-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception): .+)")
"""An exception as a traceback ends with it, after whatever a logger writes before."""


def first_error(said: str) -> str | None:
    """The first exception of a program that failed later, for what it lacked then; None without one."""
    found = (_ERROR.search(line) for line in said.splitlines())
    return next((x[1].strip() for x in found if x), None)


FAILING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Numbers of errors of a disk that is full or broken."""


def unwritable(what: str, error: OSError, instead: str) -> KernelmarkError:
    """What cannot be written or deleted, why, and what to do `instead`. A folder that is closed to the user, or a
    file where a folder is needed, is wrong input; a disk that is full or broken is not.
    """
    kind = HarnessError if error.errno in FAILING else InputError
    return kind(f"{what}: {error.strerror or error}. {instead}")


LONGEST_NAME = 100
"""Characters of a name that a message repeats."""


def short(name: str) -> str:
    """A name for a message: one of megabytes would bury it."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"


def unknown(kind: str, name: str, known: list[str]) -> InputError:
    """The one wording for a name that does not exist, with what exists and the nearest match."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1) if len(name) <= LONGEST_NAME else []
    hint = f" Did you mean {near[0]!r}?" if near else ""
    what = ", ".join(map(short, known)) if known else "none"
    return InputError(f"unknown {kind} {short(name)!r}.{hint} Known: {what}.")
