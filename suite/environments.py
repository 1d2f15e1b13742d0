"""The virtual environments that libraries live in which cannot share one with the others.

An environment `NAME` is the folder `.venv-NAME` beside the program's own, made from
`requirements/NAME.txt` with the same torch and triton. `core` is the interpreter that runs us.
"""

from __future__ import annotations

import sys
from pathlib import Path


def interpreter(name: str) -> Path | None:
    """The Python of an environment, or None where it is not installed."""
    if name == "core":
        return Path(sys.executable)
    path = Path(sys.prefix).parent / f".venv-{name}" / "bin" / "python"
    return path if path.exists() else None
