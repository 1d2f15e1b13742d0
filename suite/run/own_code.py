"""Which code this process measures with, so that a worker can say whether it is the supervisor's.

An environment has a kernelmark of its own. It is another one where a second checkout takes the first one's
environments, or where one of two images is older; and files are changed while a run goes on. What is measured then
would stand under the supervisor's commit.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2]
"""Where the rooms lie."""
ROOMS = ("baselines", "kernels", "registry/store", "suite")
"""Those whose code a measurement comes from."""


@functools.cache
def digest() -> str:
    """Of all Python files of these rooms, by name; the same wherever they lie."""
    found = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((FOLDER / room).rglob("*.py")):
            found.update(f"{path.relative_to(FOLDER)}\0".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def other(asked: str) -> str:
    """Why this is not the code of who asked, by its digest; empty if it is, or if nobody wants to know."""
    if not asked or asked == digest():
        return ""
    return (
        f"kernelmark in {FOLDER}, which measures in this environment, is not what the run began with: "
        "install that one here, or undo what was changed in its files since"
    )
