"""What a system's CUDA graphs hold counts as its memory."""

from __future__ import annotations

import pytest
import torch
from kernelmark.suite.workloads import _pools


def test_what_graphs_hold_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free rest of a graph's pool does; that of the common pool, which anybody may have, does not."""
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 600},
        {"segment_pool_id": (0, 7), "total_size": 500, "allocated_size": 100},
        {"segment_pool_id": [0, 8], "total_size": 30, "allocated_size": 0},
    ]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 800)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert _pools.peak() == 800 + 400 + 30
