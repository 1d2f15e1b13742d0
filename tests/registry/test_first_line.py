"""What of a long text stands in one line of a message."""

from __future__ import annotations

import pytest
from kernelmark.registry.errors import first_line


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("", "nothing"),
        ("\n  \n", "nothing"),
        ("one\ntwo", "one"),
        ("\n one \ntwo", "one"),
        ("Compilation error:\n\n  x.cu(3): no such file\nmore", "Compilation error: x.cu(3): no such file"),
        ("nothing behind it:", "nothing behind it:"),
        (ValueError("wrong:\nvery"), "wrong: very"),
    ],
)
def test_first_line(said, line):
    assert first_line(said, "nothing") == line
