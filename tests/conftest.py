"""Ctrl-C as a terminal gives it: a shell that runs the tests in the background has it ignored, and children of a
process that ignores it inherit that.
"""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may meet the configuration of whoever runs it.
os.environ["KERNELMARK_CONFIG"] = os.devnull


@pytest.fixture
def untraced() -> Iterator[None]:
    """Without coverage's tracer: for what computes for long in lines that quicker tests reach, and takes as long
    again with it.
    """
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)
