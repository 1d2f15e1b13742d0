"""The device's own limits, at sizes that take no time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernelmark.suite.measure import limits
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.stopping import Sampling


def test_ceilings_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "COPY_BYTES", {"cpu": [1 << 14, 1 << 20]})
    monkeypatch.setattr(limits, "ONE_WAY_BYTES", {"cpu": [1 << 14]})
    monkeypatch.setattr(limits, "MATMUL_SIZE", {"cpu": 64})
    monkeypatch.setattr(limits, "SAMPLING", Sampling(min_samples=3, max_samples=3, min_seconds=0, max_seconds=1))
    monkeypatch.setattr(limits, "CPU_SECONDS", 1)  # a machine that has other work takes its time
    flushed = []
    ceilings = list(limits.measure(Cpu(_flush=lambda: flushed.append(0)), replicate=2))
    assert [(x.what, x.size, x.dtype, x.replicate) for x in ceilings] == [
        ("copy", 1 << 14, None, 2),
        ("copy", 1 << 20, None, 2),
        ("read", 1 << 14, None, 2),
        ("write", 1 << 14, None, 2),
        ("matmul", 2 * 64**3, "fp32", 2),
        ("matmul", 2 * 64**3, "bf16", 2),
    ]
    assert all(x.time_ms > 0 for x in ceilings)
    # Cold: before every sample, and the one that calibrates. Reading, writing and products in fp32: two ways each.
    assert len(flushed) == 9 * 4


def test_what_others_work_leaves_no_time_of_is_not_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "COPY_BYTES", {"cpu": [1 << 14, 1 << 20]})
    monkeypatch.setattr(limits, "ONE_WAY_BYTES", {"cpu": [1 << 14]})
    monkeypatch.setattr(limits, "MATMUL_SIZE", {"cpu": 64})
    times = iter([-0.128, 0.0, -0.2, 0.3, -0.1, -0.4, 0.5, 0.2, 0.0])
    monkeypatch.setattr(limits, "_time", lambda *args: next(times))
    found = [(x.what, x.time_ms) for x in limits.measure(Cpu(), replicate=0)]
    assert found == [("read", 0.3), ("matmul", 0.2)]


def test_a_call_on_a_cpu_is_sampled_for_a_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(limits, "finished", lambda samples, seconds, sampling: asked.append(sampling) or samples)
    limits._time(Cpu(_flush=lambda: None), 64, 0, lambda: None)
    assert {x.max_seconds for x in asked} == {0.1}


def test_sizes_are_bytes_read_plus_written():
    call = limits.copy(Cpu(), 1 << 14)
    assert call().numel() == 1 << 13
    whole, halves = limits.reads(Cpu(), 1 << 14)
    assert float(whole()) > 1000
    assert float(halves()) > 400
    assert [x().nbytes for x in limits.writes(Cpu(), 1 << 14)] == [1 << 14, 1 << 14]
    assert limits.COPY_BYTES["cuda"][-1] == 1 << 32
    assert limits.COPY_BYTES["cuda"][0] == limits.COPY_BYTES["cpu"][0] == 16 << 10


def test_no_fp8_rate_where_the_gpu_has_none(monkeypatch: pytest.MonkeyPatch):
    gpu: Any = SimpleNamespace(kind="cuda", torch_device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert limits.products(gpu, 16, "e4m3") == ()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert len(limits.products(gpu, 16, "e4m3")) == 1
    assert limits.products(Cpu(), 16, "e4m3") == ()


def test_tf32_is_for_its_own_product_alone():
    gpu: Any = SimpleNamespace(kind="cuda", torch_device=torch.device("cpu"))
    seen = []
    assert "tf32" in limits.MATMUL_DTYPES["cuda"]
    (call,) = limits.products(gpu, 16, "tf32")
    assert call().shape == (16, 16)
    assert torch.get_float32_matmul_precision() == "highest"

    class Seen:
        def __matmul__(self, other: object) -> None:
            seen.append(torch.get_float32_matmul_precision())

    limits._narrowed(Seen(), None)
    assert (seen, torch.get_float32_matmul_precision()) == (["high"], "highest")


def test_two_libraries_multiply_in_fp32_on_a_cpu():
    mkl, onednn = limits.products(Cpu(), 40, "fp32")
    torch.testing.assert_close(mkl(), onednn())
    assert len(limits.products(Cpu(), 40, "bf16")) == 1
