"""Stacks as faulthandler writes them: where a process is, and what else it wrote."""

from __future__ import annotations

import subprocess
import sys

from kernelmark.suite.measure.stacks import Frame, busy, frames, of_asked, without

WRITTEN = """one line
another
Thread 0x00007f0c0a3fe6c0 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/home/somebody/watch.py", line 7 in watch

Current thread 0x00007f0c3b2f9740 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 451 in result
  File "/venv/torch/_inductor/async_compile.py", line 520 in wait
  File "<string>", line 3 in <module>

Thread 0x00007f0c0b3fe6c0 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
"""
PROGRAM = """
import concurrent.futures, faulthandler, os, signal, threading, time
faulthandler.register(signal.SIGTERM, file=2, all_threads=True, chain=True)

def sleeps():
    time.sleep(60)

def asks(future):
    future.result()

threading.Thread(target=sleeps, daemon=True).start()
threading.Timer(.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
asks(concurrent.futures.Future())
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
    again = WRITTEN + 'Current thread 0x1 (most recent call first):\n  File "/x.py", line 1 in f\n'
    assert [str(x) for x in of_asked(again)] == ["x.py:1 f"]


def test_of_what_is_no_stack():
    for text in ("", "one line", "Current thread 0x1 (most recent call first):"):
        assert of_asked(text) == []
    raised = 'Traceback (most recent call last):\n  File "/x.py", line 1, in f\nValueError: no'
    assert without(raised) == raised
    assert busy([]) is None
    assert frames("nothing") == []


def test_all_only_wait():
    waiting = frames('  File "/usr/lib/python3.11/queue.py", line 171 in get')
    assert str(busy(waiting)) == "queue.py:171 get"


def test_a_process_says_where_it_is():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -15
    assert str(busy(of_asked(done.stderr))) == "<string>:9 asks"
