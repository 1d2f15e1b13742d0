"""Transformer Engine's context parallel attention on a stand-in of its module: in which order and layout ranks
hold tokens, what is asked of it, and what it does not take. The library need not be installed.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from kernelmark.baselines import transformer_engine
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.stages import Stages, Trial
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators.attention_context_parallel import OPERATOR
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import scaled_dot_product_attention

from ..ranks import spread

WAYS = transformer_engine.IMPLEMENTATIONS["attention_context_parallel"]
FEW = Sampling(min_samples=3, max_samples=3, min_seconds=0, warmup_s=0, energy="never")
STREAM = object()
"""What it is given for one beside the caller's."""


class FakeAttention:
    """What `DotProductAttention` computes of ranks' parts in its documented order, by one gather."""

    def __init__(self, heads, channels, num_gqa_groups, qkv_format, attn_mask_type):
        assert qkv_format == "bshd"
        self.heads, self.channels, self.groups, self.mask = heads, channels, num_gqa_groups, attn_mask_type

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type):
        assert cp_group is dist.group.WORLD
        assert cp_global_ranks == list(range(dist.get_world_size()))
        assert cp_stream is STREAM
        self.way = cp_comm_type

    def __call__(self, q, k, v):
        B, S = q.shape[:2]
        for x, heads in ((q, self.heads), (k, self.groups), (v, self.groups)):
            assert x.shape == (B, S, heads, self.channels)
            assert x.is_contiguous()
        q, k, v = (self.whole(x) for x in (q, k, v))
        causal = {"causal": True, "no_mask": False}[self.mask]
        whole = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        chunks, rank = whole.chunk(2 * dist.get_world_size(), 2), dist.get_rank()
        own = torch.cat((chunks[rank], chunks[-1 - rank]), 2)
        return own.transpose(1, 2).flatten(2)

    @staticmethod
    def whole(own):
        """(B, heads, S, D) in the order of the sequence."""
        halves = [x.chunk(2, 1) for x in all_gather(own.contiguous())]
        return torch.cat([x[0] for x in halves] + [x[1] for x in reversed(halves)], 1).transpose(1, 2)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """Its module, in `sys.modules`, which processes that are forked have too."""
    pytorch = ModuleType("transformer_engine.pytorch")
    pytorch.DotProductAttention = FakeAttention
    package = ModuleType("transformer_engine")
    package.pytorch = pytorch
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: STREAM)


def case(pass_="forward", mask="causal", dtype="bf16", **axes):
    given = {"B": 2, "H": 4, "Hkv": 2, "S": 48, "D": 16, "gpus": 2, **axes}
    return OPERATOR.case(given, dtype, pass_, mask=mask)


def _measured(group, of, name):
    """That it ends says that answer and gradients are right; gives what was asked."""
    device = Cpu()
    device.group = group
    bench = Workbench.build(OPERATOR, of, torch.device("cpu"), 1, group)
    asked = []

    def factory():
        call = WAYS[name](of)
        asked.append(call.conversion.__name__)
        return call

    set_ = FakeAttention.set_context_parallel_group
    FakeAttention.set_context_parallel_group = lambda self, *given: (asked.append(given[3]), set_(self, *given))
    Trial(device, bench, "hot", FEW, Stages()).run(factory)
    return asked


@pytest.mark.parametrize(
    ("world", "mask", "way", "pass_"),
    [
        (2, "causal", "p2p", "forward_backward"),
        (2, "full", "a2a", "forward"),
        (3, "causal", "all_gather", "forward_backward"),
    ],
)
def test_ranks_hold_its_chunks_in_its_layout(world, mask, way, pass_):
    found = spread(world, _measured, case(pass_, mask, gpus=world), f"transformer_engine_cp_{way}")
    assert found == [[way, "conversion"]] * world


@pytest.mark.parametrize(
    ("way", "of", "said"),
    [
        ("p2p", case(gpus=1), "`attention` is that case"),
        ("p2p", case(dtype="fp32"), "have no fp32"),
        ("all_gather", case("backward"), "cannot be repeated alone"),
        ("a2a", case(gpus=4, S=64), "2 heads cannot be shared by 4 ranks"),
    ],
)
def test_what_its_context_parallelism_lacks(way, of, said):
    with pytest.raises(NotImplementedError, match=said):
        WAYS[f"transformer_engine_cp_{way}"](of)


def test_what_no_backend_of_its_takes_is_unsupported(monkeypatch):
    def refused(self, *given):
        raise ValueError("No dot product attention backend is available for the provided inputs.")

    monkeypatch.setattr(FakeAttention, "set_context_parallel_group", lambda *given: None)
    monkeypatch.setattr(FakeAttention, "__call__", refused)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    call = WAYS["transformer_engine_cp_p2p"](case())
    q, k = torch.zeros(1, 4, 2, 16), torch.zeros(1, 2, 2, 16)
    with pytest.raises(NotImplementedError, match="No dot product attention backend"):
        call(q=q, k=k, v=k, mask="causal")
