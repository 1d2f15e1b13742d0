"""Nothing here runs without a GPU, and every test says so."""

from __future__ import annotations

from collections.abc import Iterator
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
