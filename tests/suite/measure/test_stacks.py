"""Stacks as faulthandler writes them: where a process is, and what else it wrote."""

from __future__ import annotations

import signal
import subprocess
import sys

from kernelmark.suite.measure.stacks import Frame, busy, frames, of_asked, without

WRITTEN = """one line
another
Stack (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 451 in result
  File "/venv/torch/_inductor/async_compile.py", line 520 in wait
  File "<string>", line 3 in <module>

Thread 0x00007f0c0b3fe6c0 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get

Current thread 0x00007f0c3b2f9740 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
"""
PROGRAM = """
import os, signal, sys, threading
from kernelmark.suite.measure.stacks import tell_when_ended

tell_when_ended()
begun = threading.Event()

def come_and_go():
    while True:
        threading.Thread(target=int, daemon=True).start()

def end():
    begun.wait()
    os.kill(os.getpid(), signal.SIGTERM)

def never_answers():
    begun.set()
    threading.Event().wait()

for target in [come_and_go] * int(sys.argv[1]) + [end]:
    threading.Thread(target=target, daemon=True).start()
never_answers()
"""


def test_of_the_thread_that_was_asked():
    found = of_asked(WRITTEN)
    assert [str(x) for x in found] == [
        "threading.py:327 wait",
        "_base.py:451 result",
        "async_compile.py:520 wait",
        "<string>:3 <module>",
    ]
    assert busy(found) == Frame("/venv/torch/_inductor/async_compile.py", 520, "wait")
    assert without(WRITTEN).split() == ["one", "line", "another"]


def test_the_last_of_several():
    again = WRITTEN + 'Stack (most recent call first):\n  File "/x.py", line 1 in f\n'
    assert [str(x) for x in of_asked(again)] == ["x.py:1 f"]


def test_of_what_is_no_stack():
    for text in ("", "one line", "Stack (most recent call first):"):
        assert of_asked(text) == []
    raised = 'Traceback (most recent call last):\n  File "/x.py", line 1, in f\nValueError: no'
    assert without(raised) == raised
    assert busy([]) is None
    assert frames("nothing") == []


def test_all_only_wait():
    waiting = frames('  File "/usr/lib/python3.11/queue.py", line 171 in get')
    assert str(busy(waiting)) == "queue.py:171 get"


def _ended(others: int) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, "-c", PROGRAM, str(others)]
    return subprocess.run(given, capture_output=True, text=True, check=False, timeout=60)


def test_a_process_says_where_it_is():
    done = _ended(0)
    assert done.returncode == -signal.SIGTERM
    assert busy(of_asked(done.stderr)).function == "never_answers"


def test_threads_that_come_and_go_crash_no_process_that_says_where_it_is():
    done = _ended(2)
    assert done.returncode == -signal.SIGTERM
    # Now and then one of these is asked, instead of the main one, and one that has just begun has nothing to say.
    assert of_asked(done.stderr) or not done.stderr
