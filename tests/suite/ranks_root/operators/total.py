"""The sum over ranks, small."""

import torch
from kernelmark.suite.operator import Operator, Sharding, grid


def inputs(case, device, generator):
    return {"x": torch.randn((case.world, case.axes["N"]), device=device, generator=generator)}


OPERATOR = Operator(
    name="total",
    summary="sum over ranks",
    axes={"N": "elements"},
    inputs=inputs,
    reference=lambda x: x.sum(0),
    bytes=lambda case: 8 * case.axes["N"],
    flops=lambda case: 0,
    dtypes=("fp32",),
    sharding=Sharding(
        split=lambda whole, case, rank: whole[rank].clone(),
        join=lambda parts, case: torch.stack(parts),
        part=lambda answer, case, rank: answer,
    ),
    plans={"quick_cpu": (grid("forward", dtypes="fp32", N=64, gpus=2),)},
)
