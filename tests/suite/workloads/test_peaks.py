"""What CUDA graphs work in counts, though to the allocator it is free."""

from __future__ import annotations

import pytest
import torch
from kernelmark.suite.workloads import _peaks

SEGMENTS = [
    {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 300},  # free, for whoever asks
    {"segment_pool_id": (0, 1), "total_size": 500, "allocated_size": 200},
    {"segment_pool_id": [0, 2], "total_size": 70, "allocated_size": 0},
    {"total_size": 9, "allocated_size": 0},  # an older PyTorch, which does not say
]


def test_pools_of_graphs_count_beyond_what_is_allocated_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _peaks.unseen(SEGMENTS) == 300 + 70
    assert _peaks.unseen(SEGMENTS[:1]) == 0
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 600)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SEGMENTS)
    assert _peaks.peak_allocated() == 970
