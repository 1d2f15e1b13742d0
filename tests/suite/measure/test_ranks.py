"""What is said of ranks that do not come back, and the variables without which none is started."""

from __future__ import annotations

import pytest
from kernelmark.suite.measure.ranks import NO_MULTICAST, _fate, _own_stack, _place, require_no_multicast

STACK = """Current thread 0x00007f (most recent call first):
  File "/home/someone/kernels/ring.py", line 12 in step
  File "/venv/lib/torch/distributed/x.py", line 3 in all_reduce
"""


def test_a_stack_tells_a_place_without_its_folder():
    assert _place(STACK) == "ring.py:12 step"
    assert _place("\n".join(STACK.splitlines()[2:])) is None  # it waits for others
    assert _place("") == "code that does not answer"
    assert _place(_own_stack()) == "ranks.py:" + _place(_own_stack()).partition(":")[2]


def test_how_a_process_ended():
    assert _fate(-9) == "its process was ended by SIGKILL"
    assert _fate(3) == "its process ended with exit code 3"


@pytest.mark.parametrize("name", NO_MULTICAST)
@pytest.mark.parametrize("value", [None, "", "yes"])
def test_no_ranks_without_the_variables(name, value):
    require_no_multicast(NO_MULTICAST)
    wrong = {**NO_MULTICAST, name: value}
    if value is None:
        del wrong[name]
    with pytest.raises(RuntimeError, match=f"no case on several GPUs without {name}=.*out of service"):
        require_no_multicast(wrong)
