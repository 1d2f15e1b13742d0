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


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_a_text_that_cannot_be_made_or_written_is_no_other_failure():
    assert first_line(Unreadable()) == "its text cannot be made: ValueError"
    assert first_line(ValueError("\ud800 alone")) == "? alone"
