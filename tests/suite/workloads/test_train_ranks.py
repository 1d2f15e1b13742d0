"""Training over ranks: the same losses as one process on the same tokens, by DDP and by FSDP2."""

from __future__ import annotations

import pytest
import torch
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import train

from ...ranks import spread

STEPS = 4
WORLD = 2


def losses(rank, world, way):
    """Of a few steps on a rank's own share of the tokens."""
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
    return found, {name: x.clone() for name, x in trainer.weights().items()}


def _losses(group, way):
    return losses(group.rank, group.size, way)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_ranks_learn_what_one_process_learns(way):
    alone, weights = losses(0, 1, "single")
    found = spread(WORLD, _losses, way)
    together = [sum(x) / WORLD for x in zip(*(x for x, _ in found), strict=True)]
    assert together == pytest.approx(alone, rel=1e-5)
    for name, right in weights.items():
        torch.testing.assert_close(found[0][1][name], right, rtol=1e-3, atol=1e-4)
        assert torch.equal(found[0][1][name], found[1][1][name])


def test_several_gpus_need_a_way():
    with pytest.raises(NotImplementedError, match="2 GPUs need a way to be used: parallel = ddp or fsdp2"):
        losses(0, 2, "single")
    with pytest.raises(NotImplementedError, match="ddp is of several GPUs, and this case takes one"):
        losses(0, 1, "ddp")
