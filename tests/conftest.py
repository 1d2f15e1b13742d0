"""Ctrl-C as a terminal gives it: a shell that runs the tests in the background has it ignored, and children of a
process that ignores it inherit that.
"""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may meet the configuration of whoever runs it.
os.environ["KERNELMARK_CONFIG"] = os.devnull
