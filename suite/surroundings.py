"""An environment given by its interpreter: a virtual environment's python, or a command that runs one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ..registry.errors import InputError
from . import __version__

START_S = 120.0
_ASK = "import torch, kernelmark.suite as suite, kernelmark.suite.worker; print('version', suite.__version__)"


def checked(python: Path) -> Path:
    """The interpreter of an environment to measure in, if this version of the suite can measure there.

    Takes the folder of a virtual environment too. Raises `InputError` that says what the environment lacks.
    """
    path = Path(os.path.abspath(python))  # not resolved: a virtual environment's python is a link out of it
    if (path / "bin" / "python").exists():
        path = path / "bin" / "python"
    try:
        done = subprocess.run(
            [str(path), "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=START_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{python} is no Python that runs: {why}.") from None
    said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    versions = [x.split()[1] for x in done.stdout.splitlines() if x.startswith("version ")]
    if done.returncode or not versions:
        raise InputError(
            f"the environment of {python} cannot measure: {said}. Install kernelmark and torch in it, as "
            f"`make environment NAME=...` does."
        )
    if versions[-1] != __version__:
        raise InputError(f"the environment of {python} holds kernelmark {versions[-1]}, this is {__version__}.")
    return path
