"""The timers, the ceilings and the worker on a real GPU."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from kernelmark.registry.store.record import Case
from kernelmark.suite.measure import limits
from kernelmark.suite.measure.device import Cuda, TimerUnavailable
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.memory import MemoryProfiler
from kernelmark.suite.operators.rms_norm import OPERATOR

COPY = Case("copy", "copy", {}, {}, "bf16", "forward", "", 128 << 20, 0)


@pytest.fixture(scope="module")
def device():
    """The current GPU, its stream entered."""
    here = Cuda.open()
    with here.using():
        yield here


def copy(size: int):
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def sampled(device, call, name: str, cache: str = "cold") -> float:
    timer = device.timer(COPY, cache, call, name)
    timer.sample(call)
    return median(x for _ in range(5) for x in timer.sample(call))


@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_timers_agree(device, cache):
    """On a copy of 64 MB, long enough for each of them."""
    call = copy(64 << 20)
    call()
    seen = {name: sampled(device, call, name, cache) for name in ("events", "graph")}
    if device.cupti:
        seen["cupti"] = sampled(device, call, "cupti", cache)
    assert max(seen.values()) <= 1.3 * min(seen.values()), seen


def test_a_copy_is_not_quicker_than_memory(device):
    """10 TB/s is more than any GPU of today has; a clock that is wrong by a factor would show."""
    ms = sampled(device, copy(256 << 20), "events")
    assert 2 * (256 << 20) / (ms * 1e-3) < 10e12


def test_cold_is_slower_than_hot(device):
    """An input that fits the last-level cache."""
    x = torch.randn(4 << 20, device="cuda")

    def call():
        return x.sum()

    for name in ("events", "graph"):
        assert sampled(device, call, name, "cold") > sampled(device, call, name, "hot")


def test_what_cannot_be_captured_falls_back(device):
    x = torch.randn(1 << 10, device="cuda")

    def call():
        return x.sum().item()

    with pytest.raises(TimerUnavailable, match="cannot be captured in a CUDA graph"):
        device.timer(COPY, "cold", call, "graph")
    call()  # and the context lives
    torch.rand(4, device="cuda")  # nor is the generator thought to be in a capture


def test_peak_memory(device):
    peak = device.peak_memory(lambda: torch.empty(10 << 20, dtype=torch.uint8, device="cuda"))
    assert 10 << 20 <= peak < 12 << 20  # the allocator rounds up
    with MemoryProfiler() as memory:
        x = torch.empty(6 << 20, dtype=torch.uint8, device="cuda")
        del x
    assert 6 << 20 <= memory.peak_bytes < 8 << 20
    assert memory.after_bytes == memory.before_bytes


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
def test_a_whole_trial(device, pass_):
    case = OPERATOR.case({"B": 4, "S": 512, "D": 4096}, "bf16", pass_)
    bench = Workbench.build(OPERATOR, case, device.torch_device, 1)
    trial = Trial(device, bench, "cold", Sampling(max_seconds=0.3), Stages())
    measured = trial.run(lambda: lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps))
    assert measured.timer in ("events", "graph", "cupti")
    assert measured.samples["memory"]
    assert measured.telemetry is not None
    assert measured.telemetry.sm_mhz is not None


def test_ceilings(device, monkeypatch):
    monkeypatch.setattr(limits, "COPY_BYTES", {"cuda": [1 << 16, 1 << 28]})
    found = list(limits.measure(device, 0))
    assert [x.what for x in found[:2]] == ["copy", "copy"]
    assert found[0].time_ms < found[1].time_ms
    rate = {x.dtype: x.size / x.time_ms for x in found if x.what == "matmul"}
    assert rate["bf16"] > rate["fp32"]
