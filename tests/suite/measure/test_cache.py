"""Sizes of caches, and that a flush writes over its buffer."""

from __future__ import annotations

import pytest
import torch
from kernelmark.suite.measure import cache


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("32768K", 32 << 20), ("1M\n", 1 << 20), (" 2G ", 2 << 30), ("512", 512), ("48K\n", 48 << 10)],
)
def test_parse_size(text, bytes):
    assert cache.parse_size(text) == bytes


def test_last_level_of_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "CPU_CACHE", tmp_path)
    assert cache.last_level_bytes(torch.device("cpu")) == 32 << 20
    for index, size in enumerate(("32K", "1024K", "36M", "512K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert cache.last_level_bytes(torch.device("cpu")) == 36 << 20


@pytest.mark.parametrize(("most", "bytes"), [(1 << 20, 1 << 20), (1 << 30, 16 << 10)])
def test_flush_is_twice_the_last_level_at_most_so_much(tmp_path, monkeypatch, most, bytes):
    (tmp_path / "index0").mkdir()
    (tmp_path / "index0" / "size").write_text("8K" if bytes < most else "1G")
    monkeypatch.setattr(cache, "CPU_CACHE", tmp_path)
    monkeypatch.setattr(cache, "LARGEST_FLUSH", most)
    flush = cache.flush(torch.device("cpu"))
    (buffer,) = [x.cell_contents for x in flush.__closure__]
    assert buffer.numel() == bytes
    buffer.fill_(7)
    flush()
    assert not buffer.any()
