"""What the bounds of products in 8 bits let through in deep models, and what they find: `python
tests/calibration/coarse_bounds.py --layers 48 --seed 2`, on a CPU.

The first step of workload `train` on a small Llama that is as deep: by PyTorch's parts whose products are rounded
to 8 bits, right and with a fault planted in tokens or gradients, held to the bounds of a model (`alone`) and to
those that a case makes of what rounding does (`_coarse_products`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.model import BOUNDS
from kernelmark.suite.system import Assembly
from kernelmark.suite.workloads import _coarse_products as coarse_products
from kernelmark.suite.workloads import _expected as answer
from kernelmark.suite.workloads import train
from kernelmark.suite.workloads._arms import ArmTrainer

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[ArmTrainer, Batch], Any]
CPU = torch.device("cpu")


def right(trainer: ArmTrainer, batch: Batch) -> Any:
    """The step as it is."""
    return trainer.step(*batch)


def scaled(by: float) -> Step:
    """All gradients are so many times what they should be."""

    def step(trainer: ArmTrainer, batch: Batch) -> Any:
        loss = trainer.step(*batch)
        for x in trainer.gradients().values():
            x.mul_(by)
        return loss

    return step


def one(fault: Callable[[torch.Tensor], Any]) -> Step:
    """The gradient of one parameter, the first layer's keys, is something else."""

    def step(trainer: ArmTrainer, batch: Batch) -> Any:
        loss = trainer.step(*batch)
        fault(trainer.gradients()["layers.0.key"])
        return loss

    return step


def another_sequence(trainer: ArmTrainer, batch: Batch) -> Any:
    """A third of the tokens is not looked at."""
    tokens, targets = (x.clone() for x in batch)
    tokens[:, 0], targets[:, 0] = tokens[:, 1], targets[:, 1]
    return trainer.step(tokens, targets)


def wrong_targets(trainer: ArmTrainer, batch: Batch) -> Any:
    """4 of 37 targets of a sequence are others."""
    tokens, targets = batch[0], batch[1].clone()
    targets[..., :4] = targets[..., 4:8]
    return trainer.step(tokens, targets)


STEPS: Mapping[str, Step] = {
    "right": right,
    "gradients times .7": scaled(0.7),
    "gradients times .85": scaled(0.85),
    "gradients times 1.3": scaled(1.3),
    "a third of the tokens left out": another_sequence,
    "4 of 37 targets wrong": wrong_targets,
    "one gradient dropped": one(torch.Tensor.zero_),
    "half of one dropped": one(lambda x: x[: len(x) // 2].zero_()),
    "one gradient turned round": one(torch.Tensor.neg_),
}


def main(argv: list[str] | None = None) -> int:
    """Prints what each step is off by, and what both bounds say of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    catalog = Catalog.default()
    options = {"model": "llama-tiny", "state": "master32", "products": "e4m3"}
    r = train.read(train.WORKLOAD.case({"B": 3, "S": 37}, "bf16", "program", **options))
    configuration = replace(r.chosen.configuration, layers=given.layers)
    r = replace(r, chosen=replace(r.chosen, configuration=configuration))
    expected = answer.compute(r, catalog, given.seed, CPU)
    device = SimpleNamespace(torch_device=CPU, release=lambda: None)
    session: Any = SimpleNamespace(seed=given.seed, device=device, group=SimpleNamespace(size=1))
    rounds = coarse_products.rounding(r, catalog, session, expected)
    print(f"llama-tiny of {given.layers} layers, seed {given.seed}; rounding alone: {_told(rounds.gradients)}")
    batch = answer.Batches(r, given.seed, CPU).draw(0)
    for system in coarse_products.EMULATED:
        kind = system.changes.products.removeprefix("e4m3_")
        for name, step in STEPS.items():
            if name != "right" and kind != "1x128":
                continue
            trainer = ArmTrainer(r, Assembly(system, catalog))
            trainer.load(answer.initial(r, given.seed, CPU))
            step(trainer, batch)
            found = coarse_products.gradients_apart(trainer, expected.first)
            print(f"  {kind}, {name}: {_told(found)}")
            for which, given_rounds in (("alone", coarse_products.NOTHING), ("with rounding", rounds)):
                print(f"    {which}: {_verdict(trainer, expected.first, given_rounds)}")
    return 0


def _told(x: coarse_products.Apart) -> str:
    return f"worst {x.worst:.3f}, together {x.together:.3f}, along {1 + x.along:.3f}, one {1 + x.astray:.3f}"


def _verdict(trainer: ArmTrainer, expected: answer.Step, rounds: coarse_products.Rounding) -> str:
    try:  # the loss is held elsewhere: here it is the answer's
        coarse_products.check_step("first", trainer, expected.loss, expected, BOUNDS["e4m3"], rounds)
    except Incorrect as error:
        return f"found: {error}"
    return "passes"


if __name__ == "__main__":
    sys.exit(main())
