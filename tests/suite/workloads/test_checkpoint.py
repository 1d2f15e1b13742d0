"""A file that is written whole or not at all, also where the disk is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernelmark.suite.workloads._checkpoint import Checkpoint, write

STATE = {"x": torch.arange(100_000)}


@pytest.fixture
def full() -> Iterator[None]:
    """No file grows beyond 64 KiB: within torch's writer that fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full")
def test_a_full_disk_is_said(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.pt"
    with pytest.raises(OSError, match="File too large") as raised:
        write(path, STATE)
    assert raised.value.filename == str(path)
    assert not list(path.parent.iterdir())


@pytest.mark.usefixtures("full")
def test_training_goes_on_with_the_last_state_that_fitted(tmp_path: Path) -> None:
    checkpoint = Checkpoint.of(tmp_path / "scratch", "an arm")
    checkpoint.save({"x": torch.ones(1)})
    checkpoint.save(STATE)
    found = checkpoint.load("cpu")
    assert found is not None
    assert found["x"].tolist() == [1.0]
    checkpoint.remove()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_is_no_full_disk(tmp_path: Path) -> None:
    class Local:
        pass

    with pytest.raises(Exception, match="Local"):
        Checkpoint.of(tmp_path).save({"x": Local()})


def test_without_a_folder_nothing_is_kept() -> None:
    checkpoint = Checkpoint.of(None, "an arm")
    checkpoint.save(STATE)
    assert checkpoint.load("cpu") is None
