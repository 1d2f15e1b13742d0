"""Where environments lie, what is in them, and which interpreters can measure."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.suite import environments


def test_beside_ours_or_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.delenv("KERNELMARK_ENVIRONMENTS", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "here" / ".venv"))
    assert environments.folder("apart") == tmp_path / "here" / ".venv-apart"
    monkeypatch.setenv("KERNELMARK_ENVIRONMENTS", str(tmp_path / "there"))
    assert environments.folder("apart") == tmp_path / "there" / ".venv-apart"
    assert environments.interpreter("apart") is None


def test_versions_are_read_without_running_anything(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELMARK_ENVIRONMENTS", str(tmp_path))
    assert environments.version("core", "click") == metadata.version("click")
    assert environments.version("core", "no-such-distribution") is None
    assert environments.version("apart", "click") is None  # ours is not theirs
    described = tmp_path / ".venv-apart/lib/python3.12/site-packages/click-0.0.1.dist-info/METADATA"
    described.parent.mkdir(parents=True)
    described.write_text("Metadata-Version: 2.1\nName: click\nVersion: 0.0.1\n")
    assert environments.version("apart", "click") == "0.0.1"


def test_an_interpreter_must_be_able_to_measure(tmp_path):
    assert environments.checked(Path(sys.executable)) == Path(sys.executable)
    assert environments.checked(Path(sys.prefix)) == Path(sys.prefix) / "bin" / "python"
    with pytest.raises(InputError, match="absent is no Python that runs: No such file"):
        environments.checked(tmp_path / "absent")
    poor = tmp_path / "poor"
    poor.write_text("#!/bin/sh\necho 'no torch here' >&2\nexit 1\n")
    poor.chmod(0o755)
    with pytest.raises(InputError, match="poor cannot measure: no torch here"):
        environments.checked(poor)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho version 0.0.0\n")
    other.chmod(0o755)
    with pytest.raises(InputError, match=r"other holds kernelmark 0\.0\.0, this is"):
        environments.checked(other)
