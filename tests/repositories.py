"""Git repositories that tests make, and a root of a trivial operator in one."""

from __future__ import annotations

import subprocess
from pathlib import Path

OPERATOR = """
from kernelmark.suite.operator import Operator, grid


def inputs(case, device, generator):
    import torch

    return {"x": torch.randn(case.axes["N"], device=device, generator=generator)}


def reference(x):
    return x * 2


OPERATOR = Operator(
    name="double",
    summary="Twice the input",
    axes={"N": "elements"},
    inputs=inputs,
    reference=reference,
    bytes=lambda case: 8 * case.axes["N"],
    flops=lambda case: 0,
    dtypes=("fp32",),
    plans={"quick_cpu": (grid(N=[16, 64], dtypes="fp32"),)},
    yardsticks={"copy": lambda x: x.clone()},
)
"""

KERNEL = """
import time

from ._work import SECONDS


def double(x):
    time.sleep(SECONDS)
    return x * 2
"""


class Repository:
    """A git repository to make commits in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        """What git says."""
        who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
        done = subprocess.run(
            ["git", *who, "-C", str(self.folder), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(self, **files: str) -> str:
        """Makes a commit with these files besides those that are there."""
        self.write(**files)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "more")
        return self.git("rev-parse", "HEAD")

    def write(self, **files: str) -> None:
        """Python files by name, `__` standing for a slash."""
        for name, text in files.items():
            path = self.folder / (name.replace("___", "/_").replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def sleeping(repository: Repository) -> Repository:
    """A root whose kernel's time is known: 20 ms, 20 ms again, and 30 % more in the third and last commit."""
    repository.write(operators__double=OPERATOR, kernels__cpu__double=KERNEL)
    repository.commit(kernels__cpu___work="SECONDS = 0.02\n")
    repository.commit(notes="1\n")
    repository.commit(kernels__cpu___work="SECONDS = 0.026\n")
    return repository
