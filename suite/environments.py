"""The virtual environments that libraries live in which cannot share one with the others.

An environment `NAME` is the folder `.venv-NAME` beside the program's own, made from
`requirements/NAME.txt` with the same torch and triton. `core` is the interpreter that runs us. Where
environments lie elsewhere (in images, say), the variable `KERNELMARK_ENVIRONMENTS` names the folder of these
folders; one of `core` there takes the place of ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from ..registry.errors import InputError, last_line
from . import __version__

CHECK_S = 120.0
"""How long an interpreter may take to say what it has: the first import of torch reads gigabytes."""
ASK = f"import torch, {__package__} as suite, {__package__}.run.worker; print('version', suite.__version__)"
"""What a Python that can measure runs without an error."""
Environment: TypeAlias = Callable[[Collection[Path]], AbstractContextManager[Path | None]]
"""Where one side of a comparison runs: from the folders that its workers read to the Python that starts them, None
for ours, for as long as it is held."""


def ours(folders: Collection[Path]) -> AbstractContextManager[Path | None]:
    """The environment that this program runs in."""
    return nullcontext()


def installed(python: Path) -> Environment:
    """A virtual environment, by its Python or its folder. Raises `InputError` as `checked` does."""
    path = checked(python)
    return lambda folders: nullcontext(path)


def folder(name: str) -> Path:
    """Where an environment lies, whether it is installed or not."""
    home = os.environ.get("KERNELMARK_ENVIRONMENTS")
    return (Path(home) if home else Path(sys.prefix).parent) / f".venv-{name}"


def interpreter(name: str) -> Path | None:
    """The Python of an environment, or None where it is not installed."""
    path = folder(name) / "bin" / "python"
    if name == "core" and not _exchanged():
        return Path(sys.executable)
    return path if path.exists() else None


def _exchanged() -> bool:
    """Whether `core` is another environment than the one that runs us."""
    return "KERNELMARK_ENVIRONMENTS" in os.environ and folder("core").is_dir()


def version(name: str, distribution: str) -> str | None:
    """The version of a distribution in an environment, or None where it is not there. Runs nothing of it."""
    if name == "core" and not _exchanged():
        return _version(distribution, None)
    places = tuple(str(x) for x in sorted(folder(name).glob("lib/python3*/site-packages")))
    return _version(distribution, places) if places else None


@cache
def _version(distribution: str, places: tuple[str, ...] | None) -> str | None:
    """Read once: a library stands behind many implementations, and its description is long."""
    search = {"name": distribution} if places is None else {"name": distribution, "path": list(places)}
    found = next(iter(metadata.Distribution.discover(**search)), None)
    return found.version if found else None


def checked(python: Path) -> Path:
    """The interpreter of an environment that somebody names, if this version of the suite can measure there.

    Takes the folder of a virtual environment too. Raises `InputError` that says what the environment lacks.
    """
    path = Path(os.path.abspath(python))  # not resolved: a virtual environment's python is a link out of it
    if (path / "bin" / "python").exists():
        path = path / "bin" / "python"
    try:
        done = subprocess.run(
            [str(path), "-c", ASK],
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{python} is no Python that runs: {why}.") from None
    said = last_line(done.stderr)
    versions = [x.split()[1] for x in done.stdout.splitlines() if x.startswith("version ")]
    if done.returncode or not versions:
        raise InputError(
            f"the environment of {python} cannot measure: {said}. Install kernelmark and torch in it, as "
            f"`make environment NAME=...` does."
        )
    if versions[-1] != __version__:
        raise InputError(f"the environment of {python} holds kernelmark {versions[-1]}, this is {__version__}.")
    return path
