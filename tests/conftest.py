"""Ctrl-C as a terminal gives it: a shell that runs the tests in the background has it ignored, and children of a
process that ignores it inherit that.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# What an example may take says how busy the machine is.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test may meet the configuration of whoever runs it.
os.environ["KERNELMARK_CONFIG"] = os.devnull


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end. Whatever measures collects garbage first, and would look through all of
    them each time: up to two seconds in tests of a tenth of one. The processes that runs fork do the same.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def untraced() -> Iterator[None]:
    """Without coverage's tracer: for what computes for long in lines that quicker tests reach, and takes as long
    again with it.
    """
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


@pytest.fixture(scope="session")
def apart() -> Callable[..., str]:
    """Runs Python in a process of its own and gives the last line of what it prints: pytest's process may have
    chosen Triton's interpreter. Modules are those of the house.
    """
    house = Path(__file__).resolve().parents[1]
    environment = {x: y for x, y in os.environ.items() if x not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=house,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()[-1]

    return run
