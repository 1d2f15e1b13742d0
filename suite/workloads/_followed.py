"""The losses of the first steps, which several GPUs and one process must have alike.

With the recipe's own rate from the first step on, losses run away, and how far depends on the last bit of each
sum: of a bf16 model of 1.2 B parameters two GPUs had 17.5 after a dozen steps and one process 35 (run
20261130-220141-3a41). So the rate rises from nothing to one that models of that size are trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ._recipe import HYPERPARAMETERS

if TYPE_CHECKING:
    import torch

    from ._trainer import PartsTrainer

RATE = 2e-4
"""Of the last step. Models of 1 B to 10 B parameters are trained with 1e-4 to 3e-4 (Brown et al., arXiv
2005.14165, table 2.1: 2e-4 for 1.3 B; Touvron et al., arXiv 2302.13971, table 2: 3e-4 for 7 B)."""


def rate(step: int, steps: int) -> float:
    """The learning rate of a step, from 0."""
    return RATE * (step + 1) / steps


def losses(
    trainer: PartsTrainer,
    weights: Iterable[tuple[str, torch.Tensor]],
    draw: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
) -> list[float]:
    """Of so many steps from these weights, on the tokens and targets that `draw` gives by the step's number.

    A trainer that is cut up gives the loss of what this rank has of them. Then the rate is the recipe's again.
    """
    trainer.load(weights)
    found = []
    for step in range(steps):
        trainer.hyperparameters["lr"] = rate(step, steps)
        found.append(float(trainer.step(*draw(step))))
    trainer.hyperparameters["lr"] = HYPERPARAMETERS["lr"]
    return found
