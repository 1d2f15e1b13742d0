"""Ctrl-C as a terminal gives it: a shell that runs the tests in the background has it ignored, and children of a
process that ignores it inherit that.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
