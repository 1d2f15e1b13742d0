"""The barrier of one launch's programs. More than one member needs a GPU: the interpreter runs them one by one."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from kernelmark.kernels import _grid_barrier as module
from kernelmark.kernels._grid_barrier import arrive_and_wait, counter, phase, slots


@triton.jit
def _alone(slot, out):
    before = phase(slot)
    arrive_and_wait(slot, 1, before)
    tl.store(out, before)


def test_who_comes_last_moves_the_number_on_and_clears_the_count():
    slot, out = torch.zeros(1, 2, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    for turn in range(3):
        _alone[(1,)](slot, out)
        assert out.item() == turn
        assert slot.tolist() == [[0, turn + 1]]


def test_there_are_no_slots_under_the_interpreter():
    assert slots(torch.zeros(3), 3) is None


def test_a_counter_is_a_slots_where_there_is_one(monkeypatch):
    made = counter(torch.ones(3))
    assert made.dtype == torch.int32
    assert made.tolist() == [0]
    slot = torch.zeros(1, 2, dtype=torch.int32)
    monkeypatch.setattr(module, "slots", lambda tensor, count: slot if count == 1 else None)
    assert counter(torch.ones(3)) is slot


def test_a_pool_hands_out_each_slot_once():
    pool = module._Pool.__new__(module._Pool)
    pool.memory, pool.free, pool.streams = torch.arange(module.SLOTS), 0, {}
    taken = [pool.take(n) for n in (3, 1, module.MOST)]
    assert torch.cat(taken).tolist() == list(range(4 + module.MOST))
    while pool.take(module.MOST) is not None:
        pass
    assert pool.take(1) is not None


def test_counts_that_grow_one_by_one_do_not_use_up_a_pool(monkeypatch):
    """As of batches that grow: of two streams, to all of the most rows of a launch."""
    device = torch.device("cuda", 0)
    pool = module._Pool.__new__(module._Pool)
    pool.memory, pool.free, pool.streams = torch.arange(module.SLOTS), 0, {}
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "multiprocessors", lambda tensor: 132)
    monkeypatch.setitem(module._pools, device, pool)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x = SimpleNamespace(is_cuda=True, device=device)
    for stream in (1, 2):
        monkeypatch.setattr(module, "_stream", lambda index, stream=stream: stream)
        for count in range(1, 257):
            found = slots(x, count)
            assert found is not None, (stream, count)
            assert len(found) >= count
    assert pool.free < 2 * 2 * 256
