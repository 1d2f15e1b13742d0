"""What of a long text stands in one line of a message, and how a process ended in words."""

from __future__ import annotations

import pytest
from kernelmark.registry.errors import ended, first_error, first_line


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


SERVER = """\
(APIServer pid=3) WARNING 11-30 05:45:56 [system_utils.py:299] This can cause errors like `OSError: [Errno 24]`.
ERROR 11-30 05:46:27 [executor.py:901] Traceback (most recent call last):
ERROR 11-30 05:46:27 [executor.py:901] ValueError: Available memory (16.64 GiB) is less than asked for.
(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (SERVER, "ValueError: Available memory (16.64 GiB) is less than asked for."),
        ("Traceback:\n  x\nNotImplementedError: no\nRuntimeError: so none\n", "NotImplementedError: no"),
        ("errors: 3\nit may be an Error: no\nError: yes", "Error: yes"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError: CUDA out of memory."),
        ("listening\nbye", None),
        ("", None),
    ],
)
def test_the_first_exception_is_the_cause_of_the_others(said, found):
    assert first_error(said) == found


def test_how_a_process_ended():
    assert ended(-9) == "its process was ended by SIGKILL"
    assert ended(-200) == "its process ended with exit code -200"
    assert ended(3) == "its process ended with exit code 3"
