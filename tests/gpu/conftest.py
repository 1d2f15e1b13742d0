"""Nothing here runs without a GPU, and every test says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what lies in this folder, and skips it with the reason where there is no GPU."""
    absent = not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if absent:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One test at a time on the GPU, whatever pytest runs beside: a shared device times nothing rightly."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "gpu.lock"):
        yield


@pytest.fixture(scope="session")
def apart() -> Callable[..., str]:
    """Runs Python in a process of its own and gives the last line of what it prints: pytest's process may have
    chosen Triton's interpreter. Modules are those of the house.
    """
    house = HERE.parents[1]
    environment = {x: y for x, y in os.environ.items() if x not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=house,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()[-1]

    return run
