"""Training over ranks: the same losses as one process on the same tokens, by DDP and by FSDP2."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.group import ALONE
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._hooks import HOOKS
from kernelmark.suite.workloads._parallel import Ddp, Fsdp2

from ...ranks import spread

STEPS = 4
WORLD = 2


def losses(rank, world, way):
    """Of a few steps on a rank's own share of the tokens, the weights after them, and how it was spread."""
    case = train.WORKLOAD.case(
        {"B": 1, "S": 16, "A": 2 // world, "gpus": world},
        "fp32",
        "program",
        model="llama-tiny",
        slice="first1",
        parallel=way,
    )
    trainer = train.assemble(case, Assembly(System("torch"), train.catalog()))
    whole = train.read(train.WORKLOAD.whole(case))
    cpu = torch.device("cpu")
    trainer.load(answer.initial(whole, 5, cpu))
    batches = answer.Batches(whole, 5, cpu)
    own = case.axes["A"]
    found = []
    for step in range(STEPS):
        tokens, targets = (x[rank * own :][:own] for x in batches.draw(step))
        found.append(float(trainer.step(tokens, targets)))
    return found, {name: x.clone() for name, x in trainer.weights().items()}, trainer.parallel


def _losses(group, way):
    found, weights, spread = losses(group.rank, group.size, way)
    return found, weights, spread.sent(), spread.ratio


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_ranks_learn_what_one_process_learns(way):
    alone, weights, _ = losses(0, 1, "single")
    found = spread(WORLD, _losses, way)
    together = [sum(x) / WORLD for x in zip(*(x[0] for x in found), strict=True)]
    assert together == pytest.approx(alone, rel=1e-5)
    for name, right in weights.items():
        torch.testing.assert_close(found[0][1][name], right, rtol=1e-3, atol=1e-4)
        assert torch.equal(found[0][1][name], found[1][1][name])


RATIOS = {"ddp_fp16": 2.0, "ddp_int8": 4 / (1 + 4 / 128)}


@pytest.mark.parametrize("way", [*RATIOS, "ddp_powersgd"])
def test_compressed_gradients_are_near_and_the_same_in_all_ranks(way):
    """Of fp32; how near is each way's own affair, and PowerSGD's first two steps are exact."""
    alone, weights, _ = losses(0, 1, "single")
    found = spread(WORLD, _losses, way)
    together = [sum(x) / WORLD for x in zip(*(x[0] for x in found), strict=True)]
    assert together == pytest.approx(alone, rel=1e-2)
    assert together != pytest.approx(alone, rel=1e-7)
    gradients = sum(x.numel() * 4 for x in weights.values())
    _, first, sent, ratio = found[0]
    assert sum(sent) == pytest.approx(gradients / ratio)
    assert (ratio > 10) if way == "ddp_powersgd" else (ratio == pytest.approx(RATIOS[way]))
    assert all(torch.equal(x, found[1][1][name]) for name, x in first.items())


def test_what_is_sent_is_said():
    """DDP's buckets are full from 25 MiB on, the first from 1 MiB; FSDP2's units are layers, which it gathers
    twice a pass, and the rest once; gradients are scattered once."""
    layers = [torch.nn.Linear(1 << 10, 1 << 12, bias=False) for _ in range(3)]  # 16 MiB each
    way = Ddp()
    way._module = torch.nn.Sequential(*layers)
    assert way.sent() == (16 << 20, 32 << 20)
    sharded = Fsdp2()
    sharded._module = torch.nn.Module()
    sharded._module.layers = torch.nn.ModuleList(layers[:2])
    sharded._module.head = layers[2]
    sharded._module.norm = torch.nn.Parameter(torch.zeros(1 << 10))
    assert sharded.sent() == (24 << 20, 24 << 20, (16 << 20) + (4 << 10))
    assert sharded.sent(4) == (72 << 20, 72 << 20, (40 << 20) + (4 << 10))
    assert way.sent(4) == way.sent()


@pytest.mark.parametrize(
    ("way", "bound"), [("ddp", "fp32"), ("fsdp2", "fp32"), ("ddp_int8", "bf16"), ("ddp_powersgd", "")]
)
def test_how_gradients_are_sent_says_how_far_they_may_be_off(way, bound):
    case = train.WORKLOAD.case({"B": 1, "S": 16, "gpus": 2}, "fp32", "program", model="llama-tiny", parallel=way)
    recipe, trainer = train.read(case), train.assemble(case, Assembly(System("torch"), train.catalog()))
    session = SimpleNamespace(device=Cpu.open(), group=ALONE, seed=1)
    found = train.Program(recipe, trainer, session, SimpleNamespace(expected=None)).bound
    bounds = recipe.chosen.model.bounds
    if bound:
        assert found == bounds[bound]
    else:
        assert (found.loss, found.gradient, found.change) == (bounds["fp32"].loss, math.inf, math.inf)


def test_gradients_that_are_narrow_already_need_no_hook():
    with pytest.raises(NotImplementedError, match="gradients are bfloat16 already"):
        HOOKS["ddp_bf16"](train.catalog(), 2).spread(torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(NotImplementedError, match="hook for bf16 is NCCL's"):
        HOOKS["ddp_bf16"](train.catalog(), 2).spread(torch.nn.Linear(2, 2))


def test_several_gpus_need_a_way():
    with pytest.raises(NotImplementedError, match="2 GPUs need a way to be used: parallel = ddp or fsdp2"):
        losses(0, 2, "single")
    with pytest.raises(NotImplementedError, match="ddp is of several GPUs, and this case takes one"):
        losses(0, 1, "ddp")
