"""Code is the same wherever it lies, and another with one changed file."""

from __future__ import annotations

import shutil

import pytest
from kernelmark.suite.run import own_code


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The digest of a copy of this package, and its folder."""
    own_code.digest()  # once a process, and so of the package itself
    for room in own_code.ROOMS:
        (tmp_path / room).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(
            own_code.FOLDER / room, tmp_path / room, ignore=lambda _, names: {"__pycache__"} & set(names)
        )
    monkeypatch.setattr(own_code, "FOLDER", tmp_path)
    return own_code.digest.__wrapped__, tmp_path


def test_a_copy_is_the_same_code(copied):
    digest, folder = copied
    assert digest() == own_code.digest()
    (folder / "suite" / "notes.txt").write_text("no code\n")
    assert digest() == own_code.digest()


@pytest.mark.parametrize("path", ["kernels/norm/rms_norm.py", "suite/measure/more.py", "registry/store/record.py"])
def test_a_changed_file_is_other_code(copied, path):
    digest, folder = copied
    with (folder / path).open("a") as file:
        file.write("# changed\n")
    assert digest() != own_code.digest()


def test_nobody_is_refused_who_is_not_asked():
    assert own_code.other("") == own_code.other(own_code.digest()) == ""
    assert "in this environment, is not what the run began with" in own_code.other("0" * 64)
