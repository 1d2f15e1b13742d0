"""Runs every finding: `python docs/findings/run.py`, or one of them by its own name.

Most compile for Hopper and need no GPU; what needs one says so. Each prints its effect, and whether the Triton
that is installed shows it. Not under `TRITON_INTERPRET=1`, which compiles nothing.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
APART = {"run", "sm90"}


def main() -> None:
    """All of them, in alphabetical order."""
    sys.path.insert(0, str(HERE))  # PYTHONSAFEPATH keeps a program's own folder off the path
    for path in sorted(HERE.glob("[a-z]*.py")):
        if path.stem not in APART:
            print(f"== {path.stem}")
            held = importlib.import_module(path.stem).show()
            print({True: "-> shown", False: "-> not with this Triton", None: "-> needs a GPU"}[held])


if __name__ == "__main__":
    main()
