"""NCCL over registered windows, as far as it goes without a GPU: what is asked of torch, in order, and why not."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from kernelmark.baselines import torch_symmetric_memory as module
from kernelmark.suite.operators.all_reduce import OPERATOR


class Backend:
    """What of ProcessGroupNCCL is used."""

    mem_allocator = "NCCL's"

    def __init__(self, said):
        self.said = said

    def register_mem_pool(self, pool, symm=False):
        """register_mem_pool(self, pool: MemPool, symm: bool = False) -> None"""
        self.said.append(f"register {pool} {symm}")

    def deregister_mem_pool(self, pool):
        self.said.append(f"deregister {pool}")


class Older(Backend):
    def register_mem_pool(self, pool):
        """register_mem_pool(self, pool: MemPool) -> None"""


@pytest.fixture
def said(monkeypatch):
    """A torch with NCCL 2.28, and what is asked of it."""
    said = []
    backend = Backend(said)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda device: backend)))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext(said.append(f"in {pool}")))
    monkeypatch.setattr(dist, "all_reduce", lambda x, *op: (said.append("all_reduce"), x.mul_(2)))
    yield said
    module._window.cache_clear()
    module._registered.clear()


def made(place):
    return module.IMPLEMENTATIONS["all_reduce"]["nccl_windows"](
        OPERATOR.case({"N": 4, "gpus": 2}, "fp32", "forward", place=place)
    )


@pytest.mark.parametrize("place", ["out", "in"])
def test_arrays_are_registered_once_and_given_up(said, place):
    call, x = made(place), torch.ones(4)
    for _ in range(2):
        found = call(x, place)
    assert found.tolist() == ([2.0] * 4 if place == "out" else [4.0] * 4)
    assert (found.data_ptr() == x.data_ptr()) == (place == "in")
    first = ["in pool of NCCL's", "register pool of NCCL's True"]
    assert said == [*first, "all_reduce", "all_reduce"]
    assert call.shared() == 16
    call.forget()
    assert (said[-1], call.shared()) == ("deregister pool of NCCL's", 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda p: p.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 2)),
            r"from 2.27 on, and torch has 2\.26\.2",
        ),
        (lambda p: p.setattr(dist, "is_nccl_available", lambda: False), "torch has none"),
        (lambda p: p.setenv("NCCL_WIN_ENABLE", "0"), "NCCL_WIN_ENABLE=0 leaves"),
        (
            lambda p: p.setattr(dist.group.WORLD, "_get_backend", lambda device: Older([])),
            r"its Older has no register_mem_pool\(symm=True\)",
        ),
        (
            lambda p: p.setattr(dist.group.WORLD, "_get_backend", lambda device: object()),
            r"its object has no register_mem_pool",
        ),
    ],
)
def test_what_it_lacks_is_said(said, monkeypatch, change, reason):
    change(monkeypatch)
    with pytest.raises(NotImplementedError, match=reason):
        made("out")
