"""FlashInfer on stand-ins of its modules: which pages it is told of, all of ours that are in use, in order, and no
other; and over which workspace it reduces arrays.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.baselines.flashinfer import COLUMNS, all_reduce, in_use
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.all_reduce import OPERATOR

from ..ranks import spread

FEW = Sampling(min_samples=3, max_samples=3, min_seconds=0, warmup_s=0, energy="never")
MAPPED = 2 << 20
"""Bytes of each of a workspace's three pieces."""
PATTERN = object()
"""Its name of an all-reduce with nothing fused."""


class Workspace:
    """What its own says and keeps: memory is free when it is destroyed, and its references are gone."""

    def __init__(self, log, given):
        self.given, self.log = given, log
        self.ipc_handles = [["addresses"]]
        self.mem_handles = [SimpleNamespace(get_allocation_size=lambda: MAPPED)] * 3

    def destroy(self):
        self.log.append("destroyed")
        del self.mem_handles, self.ipc_handles


def stand_in(log):
    """`flashinfer.comm` over the processes' own all-reduce."""

    def create(**given):
        log.append(given)
        return Workspace(log, given)

    def reduced(input, workspace, pattern, launch_with_pdl):  # its names
        given = workspace.given
        assert (pattern, launch_with_pdl) == (PATTERN, True)
        assert input.is_contiguous()
        assert input.shape == (given["max_token_num"], given["hidden_dim"])
        assert input.dtype == given["dtype"]
        output = input.clone()
        dist.all_reduce(output)
        return output

    comm = ModuleType("flashinfer.comm")
    comm.create_allreduce_fusion_workspace, comm.allreduce_fusion = create, reduced
    comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion = lambda handles: log.append(handles)
    comm.AllReduceFusionPattern = SimpleNamespace(kAllReduce=PATTERN)
    flashinfer = ModuleType("flashinfer")
    flashinfer.comm = comm
    return {"flashinfer": flashinfer, "flashinfer.comm": comm}


def case(N, dtype="bf16", gpus=2, place="out"):
    return OPERATOR.case({"N": N, "gpus": gpus}, dtype, "forward", place=place)


def _measured(group, of):
    """What a measurement, which compares the sums, asked of the library."""
    log = []
    sys.modules.update(stand_in(log))
    device = Cpu()
    device.group = group
    bench = Workbench.build(OPERATOR, of, torch.device("cpu"), 1, group)
    Trial(device, bench, "hot", FEW, Stages()).run(lambda: all_reduce(of))
    return log


@pytest.mark.parametrize(("N", "tokens", "dtype"), [(512, 1, "bf16"), (3 * COLUMNS, 3, "fp32")])
def test_arrays_are_tokens_over_a_workspace_without_multicast_that_is_given_up(N, tokens, dtype):
    for rank, (made, released, destroyed) in enumerate(spread(2, _measured, case(N, dtype))):
        assert made == {
            "backend": "trtllm",
            "world_size": 2,
            "rank": rank,
            "max_token_num": tokens,
            "hidden_dim": N // tokens,
            "dtype": {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype],
        }
        assert (released, destroyed) == ([["addresses"]], "destroyed")


def test_memory_that_peers_can_read(monkeypatch):
    """Also of a workspace that has no handles of it, and none when it was given up."""
    log = []
    modules = stand_in(log)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    workspace = Workspace(log, {})
    modules["flashinfer.comm"].create_allreduce_fusion_workspace = lambda **given: workspace
    call = all_reduce(case(COLUMNS))
    assert call.shared(x=None, place="out") == 3 * MAPPED
    workspace.mem_handles = []
    workspace.metadata = {"buffer_size": 5, "flag_size": 3, "lamport_buffer_size": 7, "tp_size": 2}
    assert call.shared(x=None, place="out") == 15
    for _ in range(2):
        call.forget()
        assert call.shared(x=None, place="out") == 0
    assert log == [[["addresses"]], "destroyed"]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (case(COLUMNS, place="in"), "sums only, no mean in place"),
        (case(COLUMNS, gpus=3), "2, 4 and 8 GPUs, not for 3"),
        (case(COLUMNS, gpus=1), "not for 1"),
        (case(COLUMNS + 8), "no tokens of 4096 columns"),
        (case(12), "nor one of whole 16 bytes"),
        (case(1 << 30), "32 bits"),
    ],
)
def test_what_its_all_reduce_does_not_take(monkeypatch, of, said):
    for name, module in stand_in([]).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(NotImplementedError, match=said):
        all_reduce(of)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([1, 4, 16]))
def test_pages_in_use(lengths, page):
    across = -(-max(lengths) // page)
    tables = [[f"{b}:{i}" for i in range(across)] for b in range(len(lengths))]
    flat = [x for table in tables for x in table]
    starts, places, last = in_use(lengths, page, across)
    assert len(starts) == len(lengths) + 1
    for b, length in enumerate(lengths):
        pages = [flat[place] for place in places[starts[b] : starts[b + 1]]]
        tokens = [(p, t) for p in pages for t in range(page)]
        told = tokens[: (len(pages) - 1) * page + last[b]]
        assert told == [(tables[b][t // page], t % page) for t in range(length)]
