"""Running a program under a capture, as Python itself would run it."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...registry.errors import InputError
from .recorder import Capture


@contextlib.contextmanager
def _as_main(arguments: Sequence[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as Python sets them for a program."""
    kept = sys.argv, sys.path[:]
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = kept


def run(command: Sequence[str], seen: Capture) -> int:
    """Runs `python FILE …` or `python -m MODULE …` in this process, and records what it calls.

    Gives the program's exit status. Raises `InputError` for any other command.
    """
    given = list(command)
    if given and Path(given[0]).name.startswith("python"):
        given = given[1:]
    if given[:1] == ["-m"] and len(given) > 1:
        start: Callable[[], Any] = partial(runpy.run_module, given[1], run_name="__main__", alter_sys=True)
        arguments = given[1:]
    elif given and not given[0].startswith("-"):
        if not Path(given[0]).is_file():
            raise InputError(f"no program at {given[0]}.")
        start = partial(runpy.run_path, given[0], run_name="__main__")
        arguments = given
    else:
        raise InputError("say which program after `--`: python FILE …, or python -m MODULE ….")
    with _as_main(arguments):
        if "-m" not in command:
            sys.path.insert(0, str(Path(given[0]).resolve().parent))
        else:
            sys.path.insert(0, str(Path.cwd()))
        try:
            with seen:
                start()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
