"""The Python interface, cell by cell; `# %%` begins a cell where an editor knows that.

It measures one operator, with an implementation of its own added, in this process. For a number to publish use
`kernelmark run`, which measures in fresh processes.
"""

# %% An implementation is a factory: from a case to what is called with the operator's inputs.
from __future__ import annotations

from typing import Any

from kernelmark.suite.api import MemoryProfiler, Runner
from kernelmark.suite.measure.stopping import Sampling


def by_hand(case: Any) -> Any:
    """x · rsqrt(mean of x² + eps) · weight, step by step in PyTorch."""
    return lambda x, weight, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


# %% Measure it beside PyTorch, on whatever device is here. A wrong answer would be a row without a time.
quick = Sampling(max_seconds=0.2, warmup_s=0.1)
runner = Runner("rms_norm", only=("torch",), sampling=quick)
runner.add("by_hand", by_hand)
with MemoryProfiler() as memory:
    runner.run(axes={"B": 1, "S": 256, "D": 1024}, dtype="fp32", replicates=3)

# %% Rows are the replicates taken together.
for row in runner.rows():
    if row.value() is None:
        print(f"{row.implementation:10} {row.status}: {row.reason}")
    else:
        print(f"{row.implementation:10} {row.value():8.4f} ms, {row.speedup_vs_best_baseline or 1:.2f} x the best")

# %% Peak memory is the device's; None where the device does not say.
print("peak memory:", memory.peak_bytes)
