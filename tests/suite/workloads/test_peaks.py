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
    assert _peaks.peak_allocated(_peaks.Left()) == 970


def test_what_earlier_programs_hold_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors and of graphs' pools, and a row with much of it says so."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100 << 20)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SEGMENTS)
    left = _peaks.Left.now(True)
    assert left == _peaks.Left(100 << 20, 370)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: (100 << 20) + 5000)
    assert _peaks.peak_allocated(left) == 5000
    more = [*SEGMENTS, {"segment_pool_id": (0, 3), "total_size": 50, "allocated_size": 10}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: more)
    assert _peaks.peak_allocated(left) == 5040
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [])  # the earlier ones' are gone since
    assert _peaks.peak_allocated(left) == 5000
    assert left.remarks == ("0.10 GiB of earlier programs were still held; peaks are without them",)
    assert _peaks.Left.now(False).remarks == _peaks.Left(1000, 1000).remarks == ()
