"""Errors that end a command, each with its exit code (README.md lists them).

A case that does not end well is never one of these: it is a `Status` with a reason.
"""

from __future__ import annotations


class KernelmarkError(Exception):
    """Base of what the command line prints as one message, without a traceback."""

    exit_code = 5


class InputError(KernelmarkError):
    """Wrong usage or input: the message says what is wrong, what exists and what to do."""

    exit_code = 2


class HarnessError(KernelmarkError):
    """The harness itself failed: no disk, no worker, a planted fault missed."""

    exit_code = 5


def unknown(kind: str, name: str, known: list[str]) -> InputError:
    """The one wording for a name that does not exist, with what exists and the nearest match."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    what = ", ".join(known) if known else "none"
    return InputError(f"unknown {kind} {name!r}.{hint} Known: {what}.")
