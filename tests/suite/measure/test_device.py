"""The CPU as a device, and what of a GPU needs none."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from kernelmark.registry.store.record import Case
from kernelmark.suite.measure import cache
from kernelmark.suite.measure.device import Cpu, Cuda, TimerUnavailable, opened, refusal

CASE = Case("x", "x", {}, {}, "fp32", "forward", "", 8, 0)


def test_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "LARGEST_FLUSH", 1 << 16)
    device = Cpu.open()
    assert (device.kind, device.nvml, device.torch_device) == ("cpu", None, torch.device("cpu"))
    with device.using():
        device.synchronize()
        assert device.peak_memory(lambda: None) is None
        device.release()
    for name in ("auto", "events", "graph", "cupti"):  # the GPU's timers mean nothing here
        assert device.timer(CASE, "cold", lambda: None, name).name == "monotonic"
    flushed = []
    device = Cpu(_flush=lambda: flushed.append(0))
    device.timer(CASE, "hot", lambda: None, "auto").sample(lambda: None)
    device.fallback("hot").sample(lambda: None)
    assert flushed == []
    device.timer(CASE, "cold", lambda: None, "auto").sample(lambda: None)
    device.fallback("cold").sample(lambda: None)
    assert flushed == [0, 0]


def test_what_a_call_raised_stands_before_what_its_capture_ended_with():
    own, end = RuntimeError("a copy to the host"), RuntimeError("a previous error during capture")
    assert refusal(own) is own
    end.__context__ = own
    assert refusal(end) is own
    end.__context__ = KeyError("of something else")
    assert refusal(end) is end


def test_cupti_by_name_where_it_is_not_installed():
    with pytest.raises(TimerUnavailable, match="cupti-python is not installed"):
        Cuda(cupti=False).timer(CASE, "cold", lambda: None, "cupti")


def test_events_time_what_is_long_and_whatever_else_is_asked():
    device = Cuda(_flush=lambda: None)
    assert device.timer(CASE, "cold", lambda: None, "events").name == "events"
    long = Case("x", "x", {}, {}, "fp32", "forward", "", 1 << 30, 0)
    assert device.timer(long, "hot", lambda: None, "auto").name == "events"
    assert device.fallback("cold").name == "events"


def test_garbage_waits_while_memory_is_measured(monkeypatch: pytest.MonkeyPatch):
    """What a call allocates, whatever earlier ones left behind."""
    for name, value in {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 100}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 350)
    seen = []
    assert Cuda().peak_memory(lambda: seen.append(gc.isenabled())) == 250
    with pytest.raises(ZeroDivisionError):
        Cuda().peak_memory(lambda: 1 // 0)
    assert (seen, gc.isenabled()) == ([False], True)


def test_a_device_is_opened_by_its_kind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "LARGEST_FLUSH", 1 << 16)
    monkeypatch.setattr(Cuda, "open", Cuda)
    assert isinstance(opened("cpu"), Cpu)
    assert isinstance(opened("cuda"), Cuda)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu():
    with pytest.raises((RuntimeError, AssertionError)):
        Cuda.open()


@pytest.mark.parametrize(
    "given", ["", "max_split_size_mb:512", "expandable_segments: True", "backend:cudaMallocAsync"]
)
@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_memory_grows_for_as_long_as_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, given: str, ends: str):
    """What else the user told the allocator stays; where memory grows already, nothing is changed."""
    told = [given]
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: told[-1], raising=False)
    within = ""
    with pytest.raises(MemoryError) if ends != "well" else contextlib.nullcontext(), Cuda().growing():
        within = told[-1]
        if ends != "well":
            raise MemoryError
    if "expandable" in given or "Async" in given:
        assert told == [given]
    else:
        asked = [x for x in (given, "expandable_segments:True") if x]
        assert within == ",".join(asked)
        assert told[-1] == ",".join(asked).replace("True", "False")


def test_the_allocators_settings_where_torch_does_not_tell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    with Cuda().growing():
        assert told == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    with Cuda().growing():
        assert told == ["max_split_size_mb:64,expandable_segments:True"]


def test_what_a_process_holds_is_asked_when_all_is_given_back(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    monkeypatch.setattr(Cuda, "release", lambda self: order.append("released"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: order.append("asked") or 7)
    assert Cuda().held() == 7
    assert order == ["released", "asked"]
    assert Cpu().held() == 0


def test_what_only_holds_itself_is_let_go_of_first(monkeypatch: pytest.MonkeyPatch):
    """A model's module and its graph: its memory would be in the cache that is emptied, and not be."""

    class Module:
        def __init__(self) -> None:
            self.itself = self

    for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
        monkeypatch.delattr(torch._C, name, raising=False)
    held = weakref.ref(Module())
    seen: list[Module | None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(held()))
    gc.disable()
    try:
        assert held() is not None
        Cuda().release()
    finally:
        gc.enable()
    assert seen == [None]


@pytest.mark.parametrize("name", ["_accelerator_emptyHostCache", "_host_emptyCache"])
def test_a_device_gives_back_locked_memory_of_the_host_too(monkeypatch: pytest.MonkeyPatch, name: str):
    for other in ("_accelerator_emptyHostCache", "_host_emptyCache"):
        monkeypatch.delattr(torch._C, other, raising=False)
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("device"))
    Cuda().release()
    assert told == ["device"]  # a torch that has neither
    monkeypatch.setattr(torch._C, name, lambda: told.append("host"), raising=False)
    Cuda().release()
    assert told == ["device", "device", "host"]
