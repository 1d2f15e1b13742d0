"""What lies between the GPUs of a run, where there are fewer of them than its plan asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernelmark.suite.measure import topology


@pytest.mark.parametrize(("here", "said"), [(4, "NV18"), (1, None), (0, None)])
def test_a_world_larger_than_the_host_asks_for_no_gpu_that_is_not_there(monkeypatch, here, said):
    def properties(index):
        assert index < here, f"Invalid device id {index}"
        return SimpleNamespace(uuid=f"GPU-{index}")

    linked = SimpleNamespace(get=lambda name, *arguments: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(topology.Nvml, "open", lambda uuid: linked)
    assert topology.topology(8) == said
