"""Running a program under a capture, as Python itself would run it."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ...registry.errors import InputError
from .recorder import Capture

HERE = Path(__file__).parent
STARTING = (runpy.__file__, runpy.run_path.__code__.co_filename)
"""Files of what starts a program; Python names a frozen module otherwise in its frames."""


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

    Gives the program's exit status; where it fails, its traceback is printed. Raises `InputError` for any other
    command.
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
        with seen:
            return _status(start)


def _status(start: Callable[[], Any]) -> int:
    """How a program ends, as Python itself would say it: what it raises is its own fault, and not ours."""
    try:
        start()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:
        error.__traceback__ = _own(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _own(traceback: TracebackType | None) -> TracebackType | None:
    """A program's traceback without the frames of the capture, and of what started the program."""
    if traceback is None:
        return None
    inner = _own(traceback.tb_next)
    code = traceback.tb_frame.f_code
    if code.co_filename in STARTING or Path(code.co_filename).parent == HERE:
        return inner
    return TracebackType(inner, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
